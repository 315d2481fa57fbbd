"""The reader of generated code, on code as Inductor writes it for GPUs and for CPUs."""

from __future__ import annotations

import pytest
from events import Schedule, groups_of, parse

KERNEL = '''
# AOT ID: ['3_inference']
triton_per_fused_mean_mul_pow_0 = async_compile.triton('triton_per_fused_mean_mul_pow_0', r"""
@triton.jit
def triton_per_fused_mean_mul_pow_0(in_ptr0, out_ptr0, out_ptr1, xnumel, r0_numel, XBLOCK : tl.constexpr):
    pass
""", device_str='cuda')
cpp_fused_cat_1 = async_compile.cpp_pybinding(['double*', 'const double*', 'double*'], r"""
extern "C"  void  kernel(double* in_out_ptr0,
                       const double* in_ptr0,
                       double* out_ptr0)
{ }
""")
'''
CALL = """
class Runner:
    def call(self, args):
        arg0_1, arg1_1 = args
        args.clear()
        assert_size_stride(arg0_1, (1, 16, 32), (512, 32, 1), 'input')
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
"""


def wrapper(*lines: str, kernels: str = KERNEL) -> str:
    return kernels + CALL + "".join(f"            {line}\n" for line in lines)


def submit(target: str, source: str, tag: str, tags: str, lend: bool = False, overload: str = "default") -> str:
    """``tags``: a letter for each."""
    x = f"reinterpret_tensor({source}, (1, 8, 4, 8), (768, 96, 8, 1), 64)"
    arguments = (
        f"'c#0', 2, -1, [], [s27, 8], False, 'scatter_heads', '{tag}', {list(tags)}, 'scatter_heads', True, {lend}"
    )
    return f"{target} = torch.ops.ulysses_op.submit.{overload}({x}, {arguments})"


def wait(targets: str, tags: str, overload: str = "default") -> str:
    return f"torch.ops.ulysses_op.wait_.{overload}([{targets}], [buf0], 'c#0', {list(tags)})"


PROJECTION = (
    "buf0 = empty_strided_cuda((16, 96), (96, 1), torch.bfloat16)",
    "extern_kernels.mm(reinterpret_tensor(arg0_1, (16, 32), (32, 1), 0), arg1_1, out=buf0)",
)
NORMS = (
    "buf3 = empty_strided_cuda((16, 32), (32, 1), torch.bfloat16)",
    "buf4 = empty_strided_cuda((16, 32), (32, 1), torch.bfloat16)",
    "stream0 = get_raw_stream(0)",
    "triton_per_fused_mean_mul_pow_0.run(buf0, buf3, buf4, 64, 8, stream=stream0)",
)
ATTENTION = (
    "buf9 = torch.ops.aten._scaled_dot_product_flash_attention.default(buf5, buf6, buf1, scale=0.125)",
    "buf10 = buf9[0]",
    "del buf9",
    "buf11 = torch.ops.ulysses_op.gather_heads.default(buf10, 'c#0', 2, -1, [], [], False)",
)


@pytest.mark.parametrize("overload", ["default", "uncaptured"])
@pytest.mark.parametrize("lend", [False, True])
def test_a_group_in_triton_code(lend: bool, overload: str) -> None:
    found = parse(
        wrapper(
            *PROJECTION,
            submit("buf1", "buf0", "0", "012", lend, overload),
            *NORMS,
            submit("buf5", "buf3", "1", "012", lend, overload),
            submit("buf6", "buf4", "2", "012", lend, overload),
            "buf7 = buf5; del buf5  # reuse",
            wait("buf1, buf7, buf6", "012", overload),
            *ATTENTION,
        )
    )
    lent = " lent" if lend else ""
    assert found.kind == "inference"
    assert found.events == [
        *["mm", f"submit scatter 0{lent}", "kernel", f"submit scatter 1{lent}", f"submit scatter 2 final{lent}"],
        *["wait_ 0 1 2", "attention", "gather_heads"],
    ]
    assert groups_of(found.events) == [[1, 3, 4]]
    assert found.disorder() == []


def test_arguments_by_keyword() -> None:
    lines = (
        "buf1 = torch.ops.ulysses_op.submit.default(buf0, 'c#0', 2, -1, [], [], False, 'gather_heads', lend=True, "
        "tag='3', tags=['3'])",
        "torch.ops.ulysses_op.wait_.default(targets=[buf1], sources=[buf0], communicator='c#0', tags=['3'])",
    )
    assert parse(wrapper(*lines)).events == ["submit gather 3 final lent", "wait_ 3"]


def test_cpp_code() -> None:
    lines = (
        "cpp_fused_cat_1(buf2, arg0_1, buf3)",
        "extern_kernels.addmm(arg1_1, arg0_1, buf0, alpha=1, beta=1, out=buf1)",
    )
    assert parse(wrapper(*lines)).events == ["kernel", "mm"]


def disorder(*lines: str) -> list[str]:
    return parse(wrapper(*lines)).disorder()


def test_groups_out_of_order_are_found() -> None:
    first, final = submit("buf5", "buf0", "0", "01"), submit("buf6", "buf0", "1", "01")
    end = wait("buf5, buf6", "01")
    assert disorder(first, final, end) == []
    assert disorder(final, first, end) == [
        "wait_ 0 1 (2) for no group that is under way",
        "no wait_ for scatter 1",
        "no wait_ for scatter 0",
    ]
    assert disorder(first, end, final)[0] == "wait_ 0 ? (1) for no group that is under way"
    assert disorder(first, final, wait("buf6, buf5", "10"))[0] == "wait_ 1 0 (2) for no group that is under way"
    assert disorder(first, final, wait("buf6, buf5", "01"))[0] == "wait_ ? ? (2) for no group that is under way"
    assert disorder(submit("buf7", "buf0", "0", "01"), first, final, end)[0] == (
        "submit scatter 0 (1) while that tag is under way"
    )
    assert disorder(first, final) == ["no wait_ for scatter 0, scatter 1"]
    other, other_end = submit("buf7", "buf0", "2", "2"), wait("buf7", "2")
    assert disorder(first, final, other, end, other_end) == []  # two groups may be under way
    assert disorder(first, other, final, end, other_end) != []  # but not their submissions mixed
    copied = "buf5 = torch.ops.aten.clone.default(buf5)"
    assert parse(wrapper(first, copied, final, end)).events[-1] == "wait_ ? 1"


def test_partitions_are_read_where_they_are_called() -> None:
    partition = """
def partition_0(args):
    arg9, arg8 = args
    args.clear()
    buf0 = empty_strided_cuda((16, 96), (96, 1), torch.bfloat16)
    extern_kernels.mm(arg9, arg8, out=buf0)
    return (buf0, )
"""
    lines = (
        "partition0_args = [arg0_1, arg1_1]",
        "(buf7,) = self.partitions[0](partition0_args)",
        "del partition0_args",
        submit("buf1", "buf7", "0", "0"),
        wait("buf1", "0"),
    )
    assert parse(wrapper(*lines, kernels=KERNEL + partition)).events == ["mm", "submit scatter 0 final", "wait_ 0"]


def test_an_attention_under_checkpointing() -> None:
    line = "buf1 = torch.ops.higher_order.run_with_rng_state(state, torch.ops.aten._scaled_dot_product_{}, arg0_1)"
    assert parse(wrapper(line.format("flash_attention_for_cpu.default"))).events == ["attention"]
    assert parse(wrapper(line.format("efficient_attention_backward.default"))).events == ["attention_backward"]


def needing(*events: tuple[str, tuple[int, ...]]) -> Schedule:
    return Schedule([text for text, _ in events], [frozenset(needs) for _, needs in events])


def test_v_behind_work_of_others_is_found() -> None:
    v_last = needing(
        ("mm", ()),
        ("kernel", (0,)),
        ("mm", ()),
        ("submit scatter 0", (0,)),
        ("submit scatter 1 final", (0, 1)),
    )
    for every in (False, True):
        assert v_last.overtaking(every) == ["kernel (1) before submit scatter 0 (3)"]
    assert v_last.hasty() == []
    assert v_last.kernels == 1


def test_q_behind_the_projection_of_k_is_found() -> None:
    late = needing(
        ("mm", ()),
        ("submit scatter 0", (0,)),
        ("mm", ()),
        ("mm", ()),
        ("kernel", (3,)),
        ("submit scatter 1", (2,)),
        ("submit scatter 2 final", (3, 4)),
    )
    assert late.overtaking(every=False) == []
    assert late.overtaking(every=True) == ["mm (3) before submit scatter 1 (5)"]


def test_a_submission_that_needs_more_than_later_ones_is_found() -> None:
    found = needing(("mm", ()), ("kernel", (0,)), ("submit scatter 0", (0, 1)), ("submit scatter 1 final", (0,)))
    assert found.hasty() == ["submit scatter 0 (2) needs 2 events, another 1"]
    assert found.overtaking(every=True) == []


def test_work_outside_of_the_gaps_is_found() -> None:
    ahead = needing(("mm", ()), ("mm", ()), ("submit scatter 0 final", (0,)), ("wait_", (2,)), ("attention", (3,)))
    assert ahead.idling() == ["mm (1) before submit scatter 0 final (2)"]
    behind = needing(("mm", ()), ("submit scatter 0 final", (0,)), ("wait_", (1,)), ("mm", ()), ("attention", (2,)))
    assert behind.idling() == ["mm (3) behind wait_ (2)"]
    inside = needing(("mm", ()), ("submit scatter 0 final", (0,)), ("mm", ()), ("wait_", (1,)), ("attention", (3,)))
    assert inside.idling() == []
    # The wait of one group may stand in the gap of another.
    first, second = ("submit scatter 0 final", ()), ("submit gather 1 final", ())
    both = needing(first, second, ("wait_", (0,)), ("mm", (2,)), ("mm", ()), ("wait_", (1,)), ("mm", (5,)))
    assert both.idling() == []
