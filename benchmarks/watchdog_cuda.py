"""`python benchmarks/watchdog_cuda.py`: what the watchdog adds to a group on CUDA, on one device.

The handshakes of a group write three words more for it: what the queue waits for, and when it stands where (see
csrc/cuda_transport.cpp). A handshake with itself, with these words and without, in turn: what the calls take on the
host, and the batches on the device. A group has two handshakes. Its thread looks 50 times a second, beside them.
"""

from __future__ import annotations

import ctypes
import statistics
import struct
import sys
import time

import torch

WAIT_64, WRITE_64, EQUAL = 4, 5, 1  # CU_STREAM_MEM_OP_WAIT_VALUE_64, _WRITE_VALUE_64 and CU_STREAM_WAIT_VALUE_EQ of cuda.h
HANDSHAKES, ROUNDS = 200, 40


def operation(kind: int, address: int, value: int) -> bytes:
    """A CUstreamBatchMemOpParams, of 48 bytes."""
    return struct.pack("<IIQQIIQQ", kind, 0, address, value, EQUAL if kind == WAIT_64 else 0, 0, 0, 0)


def batch(pad: int, watched: bool) -> tuple[ctypes.Array[ctypes.c_char], int]:
    words = [pad + 8 * i for i in range(3)]  # the slot, then phase and current value
    operations = [operation(WRITE_64, words[0], 7), operation(WAIT_64, words[0], 7), operation(WRITE_64, words[0], 0)]
    if watched:
        before = [operation(WRITE_64, words[2], 7), operation(WRITE_64, words[1], 1)]
        operations = [*before, *operations, operation(WRITE_64, words[1], 2)]
    return ctypes.create_string_buffer(b"".join(operations)), len(operations)


def main() -> int:
    if not torch.cuda.is_available():
        print("watchdog_cuda: no CUDA device is available", file=sys.stderr)
        return 2
    enqueue = ctypes.CDLL("libcuda.so.1").cuStreamBatchMemOp_v2
    pad = torch.zeros(4, dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    kinds = {"without": batch(pad.data_ptr(), False), "with": batch(pad.data_ptr(), True)}
    host_us: dict[str, list[float]] = {kind: [] for kind in kinds}
    device_us: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(ROUNDS + 5):
        for kind, (operations, count) in kinds.items():
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                torch.cuda._sleep(4_000_000)
                begin.record()
                start = time.perf_counter()
                for _ in range(HANDSHAKES):
                    status = enqueue(ctypes.c_void_p(stream.cuda_stream), count, operations, 0)
                    assert status == 0, f"cuStreamBatchMemOp: {status}"
                took_us = (time.perf_counter() - start) * 1e6
                end.record()
            torch.cuda.synchronize()
            if turn >= 5:
                host_us[kind].append(took_us / HANDSHAKES)
                device_us[kind].append(begin.elapsed_time(end) * 1e3 / HANDSHAKES)
    assert pad.tolist()[:3] == [0, 2, 7], pad.tolist()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {ROUNDS} rounds of {HANDSHAKES} handshakes")
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
