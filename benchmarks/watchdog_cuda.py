"""`python benchmarks/watchdog_cuda.py`: what the watchdog adds to a group on CUDA.

For it, every handshake writes one word more: the value that it awaits (see csrc/cuda_transport.h). Handshakes between
two queues, on two devices where there are two, with that word and without, in turn: what the calls take on the host,
and the handshakes on the first device. A group has two of them. Its thread looks 50 times a second, beside them.
"""

from __future__ import annotations

import ctypes
import statistics
import struct
import sys
import time

import torch

WAIT_64, WRITE_64, EQUAL = 4, 5, 1  # CU_STREAM_MEM_OP_WAIT_VALUE_64, _WRITE_VALUE_64, CU_STREAM_WAIT_VALUE_EQ of cuda.h
HANDSHAKES, ROUNDS = 200, 40
VALUE = 7

Batch = tuple[ctypes.Array[ctypes.c_char], int]


def operation(kind: int, address: int, value: int) -> bytes:
    """A CUstreamBatchMemOpParams, of 48 bytes."""
    return struct.pack("<IIQQIIQQ", kind, 0, address, value, EQUAL if kind == WAIT_64 else 0, 0, 0, 0)


def batch(own: int, peer: int, signal: int, watched: bool) -> Batch:
    """READY (0) or DONE (1), on pads of three words: a slot each, then what is awaited."""
    operations = [operation(WRITE_64, own + 8 * (1 - signal), 0), operation(WRITE_64, peer + 8 * signal, VALUE)]
    if watched:
        operations.append(operation(WRITE_64, own + 16, VALUE))
    operations.append(operation(WAIT_64, own + 8 * signal, VALUE))
    return ctypes.create_string_buffer(b"".join(operations)), len(operations)


def main() -> int:
    if not torch.cuda.is_available():
        print("watchdog_cuda: no CUDA device is available", file=sys.stderr)
        return 2
    enqueue = ctypes.CDLL("libcuda.so.1").cuStreamBatchMemOp_v2
    devices = [torch.device("cuda", rank % torch.cuda.device_count()) for rank in range(2)]
    pads = [torch.zeros(3, dtype=torch.int64, device=device) for device in devices]
    for pad, peer in zip(pads, reversed(pads), strict=True):
        pad.copy_(peer)  # lets the devices reach each other's memory
    streams = [torch.cuda.Stream(device) for device in devices]
    addresses = [pad.data_ptr() for pad in pads]
    kinds = {
        kind: [[batch(*ends, signal, kind == "with") for ends in (addresses, addresses[::-1])] for signal in range(2)]
        for kind in ("without", "with")
    }
    host_us: dict[str, list[float]] = {kind: [] for kind in kinds}
    device_us: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(ROUNDS + 5):
        for kind, handshakes in kinds.items():
            for device in devices:
                torch.cuda.synchronize(device)
            for device, stream in zip(devices, streams, strict=True):
                with torch.cuda.device(device), torch.cuda.stream(stream):
                    torch.cuda._sleep(8_000_000)  # the host gets ahead
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(streams[0])
            took = 0.0
            for number in range(HANDSHAKES):
                for device, stream, (operations, count) in zip(devices, streams, handshakes[number % 2], strict=True):
                    with torch.cuda.device(device):
                        start = time.perf_counter()
                        status = enqueue(ctypes.c_void_p(stream.cuda_stream), count, operations, 0)
                        took += time.perf_counter() - start
                        assert status == 0, f"cuStreamBatchMemOp: {status}"
            end.record(streams[0])
            end.synchronize()
            if turn >= 5:
                host_us[kind].append(took * 1e6 / (2 * HANDSHAKES))
                device_us[kind].append(begin.elapsed_time(end) * 1e3 / HANDSHAKES)
    for device in devices:
        torch.cuda.synchronize(device)
    assert [pad.tolist() for pad in pads] == [[0, VALUE, VALUE]] * 2, pads
    what = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{what}; {ROUNDS} rounds of {HANDSHAKES} handshakes")
    print("us a handshake            q1   median       q3")
    for where, samples in (("host", host_us), ("device", device_us)):
        for kind in kinds:
            q1, median, q3 = statistics.quantiles(samples[kind], n=4)
            print(f"{where:6} {kind:8}       {q1:8.3f} {median:8.3f} {q3:8.3f}")
        added = statistics.median(w - o for w, o in zip(samples["with"], samples["without"], strict=True))
        print(f"{where:6} a group pays   {2 * added:8.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
