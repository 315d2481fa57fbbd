"""What is decided and refused before anything moves, and what happens to ranks that do not submit the same."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import ranks
import torch
from cases import even
from test_exchange import BACKENDS, MEMBERS, ok

import ulysses_op
from ulysses_op import BackendUnavailableError, Communicator, MismatchError, UlyssesError


def works(comm: Communicator, members: tuple[int, ...], me: int, device: str = "cpu") -> list[str]:
    """An exchange and a group on `comm`; what is wrong with their results."""
    problems = []
    for seed, case in enumerate(
        [even("works", len(members), b=2, dtype=torch.bfloat16, layout="fused_qkv"), even("more", len(members), s=9)]
    ):
        x = oracle.make_input(case, "scatter_heads", seed, me, device)
        wanted = oracle.expected(case, "scatter_heads", seed, me, device)
        problems.append(oracle.difference(comm.scatter_heads(x), wanted))
        with comm.group("a", "b") as group:
            group.submit(x, tag="b")
            group.submit(x, tag="a", final=True)
            problems += [oracle.difference(result, wanted) for result in group.wait()]
    return [problem for problem in problems if problem]


def arrive(device: str, comm: Communicator) -> None:
    """On CUDA a failure shows on the host only once the device is through with what was queued."""
    if device == "cuda":
        torch.cuda.synchronize()
        comm.check()


# ---- the backend is a joint decision


def run_disabled(
    rank: int, world_size: int, members: tuple[int, ...], device: str, disabled: str, where: int
) -> tuple[list[str], str, str] | None:
    """`disabled` backends on the rank `where` only: an automatic choice, and each of the disabled forced."""
    if rank not in members:
        return None
    me = members.index(rank)
    problems = []
    with ranks.environment(ULYSSES_OP_DISABLE=disabled if rank == where else None):
        comm = ranks.fresh_communicator(members, "auto", device)
        for backend in disabled.split(","):
            try:
                ranks.fresh_communicator(members, backend, device).close()
                problems.append(f"backend={backend!r} was accepted")
            except BackendUnavailableError as error:
                if f"rank {members.index(where)}" not in str(error):
                    problems.append(f"backend={backend!r}: the error does not name the rank: {error}")
    problems += works(comm, members, me, device)
    answer = problems, comm.backend, comm.reason
    comm.close()
    return answer


@pytest.mark.parametrize(
    ("members", "where"), [((0, 1), 1), ((0, 1), 0), ((0, 1, 2), 2), ((1, 3), 3), ((0, 1, 2, 3), 1)]
)
def test_one_rank_without_shm_takes_all_to_c10d(pool: ranks.RankPool, members: tuple[int, ...], where: int) -> None:
    answers = [a for a in pool.run(run_disabled, members, "cpu", "shm", where) if a is not None]
    assert [problems for problems, _, _ in answers] == [[]] * len(members)
    assert {backend for _, backend, _ in answers} == {"c10d"}
    (reason,) = {reason for _, _, reason in answers}
    assert f"rank {members.index(where)}" in reason
    assert "ULYSSES_OP_DISABLE" in reason


def run_refused(
    rank: int, world_size: int, members: tuple[int, ...], refused: list[str], device: str
) -> list[str] | None:
    if rank not in members:
        return None
    me = members.index(rank)
    problems = []
    for backend in refused:
        try:
            ranks.fresh_communicator(members, backend, device).close()
            problems.append(f"backend={backend!r} was accepted")
        except BackendUnavailableError as error:
            if backend not in str(error):
                problems.append(f"the error does not name {backend!r}: {error}")
        try:
            # Without build(): the first exchange finds out.
            comm = Communicator(ranks.group_of(members), backend=backend)
            comm.scatter_heads(torch.zeros(1, 2, len(members), 4, device=device))
            problems.append(f"backend={backend!r} was used")
        except BackendUnavailableError:
            pass
    comm = ranks.fresh_communicator(members, "auto", device)
    problems += works(comm, members, me, device)
    comm.close()
    return problems


@pytest.mark.parametrize("world_size", [2, 4])
def test_gpu_backends_refuse_cpu_tensors_on_all_ranks(pool: ranks.RankPool, world_size: int) -> None:
    ok(pool.run(run_refused, MEMBERS[world_size], ["symm_mem", "cuda_ipc"], "cpu"))


def run_unequal_arguments(rank: int, world_size: int, members: tuple[int, ...]) -> list[str] | None:
    """Communicators that the ranks create with different arguments."""
    if rank not in members:
        return None
    me = members.index(rank)
    different: list[dict[str, list[Any]]] = [
        {"backend": ["shm", "c10d"]},
        {"backend": ["auto", "c10d"]},
        {"max_targets": [12, 4]},
    ]
    problems = []
    for arguments in different:
        mine = {name: values[min(me, 1)] for name, values in arguments.items()}
        try:
            comm = Communicator(ranks.group_of(members), **mine)
            comm.build()
            problems.append(f"{arguments} was accepted, {comm.backend!r} taken")
            comm.close()
        except (UlyssesError, ValueError):
            pass
    comm = ranks.fresh_communicator(members, "auto")
    problems += works(comm, members, me)
    comm.close()
    return problems


def test_ranks_that_ask_for_different_communicators(pool: ranks.RankPool) -> None:
    ok(pool.run(run_unequal_arguments, MEMBERS[3]))


def run_bad_constructions(rank: int, world_size: int) -> list[str]:
    world = ranks.group_of(tuple(range(world_size)))
    attempts: list[tuple[Callable[[], Any], tuple[type[Exception], ...]]] = [
        (lambda: Communicator(world, backend="nccl"), (ValueError,)),
        (lambda: Communicator(world, backend=""), (ValueError,)),
        (lambda: Communicator(world, max_targets=0), (ValueError,)),
        (lambda: Communicator(world, max_targets=-1), (ValueError,)),
        (lambda: Communicator(world, timeout_s=0.0), (ValueError,)),
        (lambda: Communicator(world, timeout_s=-1.0), (ValueError,)),
        (lambda: Communicator(world, timeout_s=float("nan")), (ValueError,)),
        (lambda: Communicator(7), (TypeError, ValueError)),
        (lambda: Communicator("no such group"), (TypeError, ValueError)),
        (lambda: ulysses_op.scatter_heads(torch.zeros(1, 2, 4, 4), "no such group"), (TypeError, ValueError)),
        (lambda: ulysses_op.scatter_heads(torch.zeros(1, 2, 4, 4), 7), (TypeError, ValueError)),
    ]
    return [
        problem for index, (call, kinds) in enumerate(attempts) if (problem := refusal(f"attempt {index}", call, kinds))
    ]


def refusal(name: str, call: Callable[[], Any], kinds: tuple[type[Exception], ...], says: str = "") -> str | None:
    """What is wrong with how `call` is refused: it must raise one of `kinds` with `says` in the message."""
    try:
        call()
    except kinds as error:
        return None if says in str(error) else f"{name}: {says!r} is not in {error}"
    except Exception as error:
        return f"{name}: {type(error).__name__}: {error}"
    return f"{name} was accepted"


def test_bad_constructions(pool: ranks.RankPool) -> None:
    ok(pool.run(run_bad_constructions))


def run_bad_environment(rank: int, world_size: int, members: tuple[int, ...]) -> list[str] | None:
    if rank not in members:
        return None
    problems = []
    with ranks.environment(ULYSSES_OP_DISABLE="shn"):
        problems.append(
            refusal(
                "an unknown backend in ULYSSES_OP_DISABLE",
                lambda: ranks.fresh_communicator(members, "auto"),
                (ValueError,),
                "shn",
            )
        )
    with ranks.environment(ULYSSES_OP_TIMEOUT_S="soon"):
        problems.append(
            refusal(
                "ULYSSES_OP_TIMEOUT_S", lambda: Communicator(ranks.group_of(members)).build(), (ValueError,), "soon"
            )
        )
    comm = ranks.fresh_communicator(members, "auto")
    problems += works(comm, members, members.index(rank))
    comm.close()
    return [problem for problem in problems if problem]


def test_bad_environment(pool: ranks.RankPool) -> None:
    ok(pool.run(run_bad_environment, MEMBERS[2]))


# ---- arguments


def bad_calls(p: int, me: int, device: str) -> dict[str, tuple[str, Any, dict[str, Any], str]]:
    """Name -> (direction, input, keyword arguments, a word that the message must hold)."""
    good = torch.zeros(2, 3, 2 * p, 4, device=device)
    local = torch.zeros(2, 3 * p, 2, 4, device=device)
    split = tuple((2 * r, 2 * r + 2) for r in range(p))
    seq = (3,) * p
    wrong_at_me = tuple(4 if r == me else 3 for r in range(p))
    return {
        "complex": ("scatter_heads", good.to(torch.complex128), {}, "complex128"),
        "three dimensions": ("scatter_heads", good[0], {}, "(3, "),
        "five dimensions": ("scatter_heads", good[None], {}, "(1, 2, 3, "),
        "no tensor": ("scatter_heads", [1.0], {}, "list"),
        "indivisible heads": ("scatter_heads", good[:, :, : 2 * p - 1], {}, "head_plan"),
        "too few ranges": ("scatter_heads", good, {"heads": split[:-1]}, "heads"),
        "too many ranges": ("scatter_heads", good, {"heads": (*split, (0, 1))}, "heads"),
        "a head nobody gets": ("scatter_heads", good, {"heads": ((0, 1), *split[1:])}, "heads"),
        "heads out of range": ("scatter_heads", good, {"heads": (*split[:-1], (2 * p - 2, 2 * p + 1))}, "heads"),
        "negative head": ("scatter_heads", good, {"heads": ((-1, 2), *split[1:])}, "heads"),
        "backward range": ("scatter_heads", good, {"heads": ((2, 0), *split[1:])}, "heads"),
        "heads of no pairs": ("scatter_heads", good, {"heads": tuple(range(p))}, "heads"),
        "too few lengths": ("scatter_heads", good, {"seq_lens": seq[:-1]}, "seq_lens"),
        "length against shape": ("scatter_heads", good, {"seq_lens": wrong_at_me}, "seq_lens"),
        "negative length": (
            "scatter_heads",
            good,
            {"seq_lens": tuple(3 if r == me else -1 for r in range(p))},
            "seq_lens",
        ),
        "gather of an indivisible length": ("gather_heads", local[:, : 3 * p - 1], {}, "seq_lens"),
        "gather of other lengths": ("gather_heads", local, {"seq_lens": (*seq[:-1], 4)}, "seq_lens"),
        "gather of a replicated plan": ("gather_heads", local, {"heads": ((0, 2),) * p}, "heads"),
        "gather of other heads": ("gather_heads", local[:, :, :1], {"heads": split}, "heads"),
        "gather in three dimensions": ("gather_heads", local[0], {}, "4 dim"),
        "sparse": ("scatter_heads", good.to_sparse(), {}, ""),
        "meta": ("scatter_heads", good.to("meta"), {}, "meta"),
        "misspelt direction": ("scatter_head", good, {}, "scatter_head"),
        **({"another device": ("scatter_heads", good.cpu(), {}, "cpu")} if device == "cuda" else {}),
    }


def run_bad_calls(rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str) -> list[str] | None:
    """Calls that all ranks must refuse before anything moves; the communicator works between and after them."""
    if rank not in members:
        return None
    me, p = members.index(rank), len(members)
    comm = ranks.fresh_communicator(members, backend, device)
    kinds = (ValueError, TypeError)
    problems: list[str | None] = []
    for name, (direction, x, arguments, says) in bad_calls(p, me, device).items():

        def in_group(x: Any = x, direction: str = direction, arguments: dict[str, Any] = arguments) -> None:
            with comm.group() as group:
                group.submit(x, tag="t", direction=direction, **arguments)

        problems.append(refusal(f"{name}, group", in_group, kinds, says))
        # Alone, a tensor without data gives one: that is how an exchange is traced. A group moves data at once.
        if not hasattr(comm, direction) or name == "meta":
            continue
        method = getattr(comm, direction)
        problems.append(refusal(name, lambda m=method, x=x, a=arguments: m(x, **a), kinds, says))
        if name != "another device":
            function = getattr(ulysses_op, direction)
            call = lambda f=function, x=x, a=arguments: f(x, ranks.group_of(members), **a)  # noqa: E731
            problems.append(refusal(f"{name}, function", call, kinds, says))

    good = torch.zeros(2, 3, 2 * p, 4, device=device)

    def unknown_tag() -> None:
        with comm.group("q") as group:
            group.submit(good, tag="k")

    def same_names() -> None:
        with comm.group("q", "q") as group:
            group.submit(good, tag="q")

    problems.append(refusal("a tag that the group does not name", unknown_tag, kinds, "'k'"))
    problems.append(refusal("a group that names a tag twice", same_names, kinds, "q"))
    problems += works(comm, members, me, device)
    comm.close()
    return [problem for problem in problems if problem]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_bad_calls(pool: ranks.RankPool, world_size: int, backend: str) -> None:
    ok(pool.run(run_bad_calls, MEMBERS[world_size], backend, "cpu"))


def run_one_rank_corrects_itself(
    rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str
) -> list[str] | None:
    """A call refused on one rank alone costs nothing: it calls again, and meets the others."""
    if rank not in members:
        return None
    me, p = members.index(rank), len(members)
    comm = ranks.fresh_communicator(members, backend, device)
    problems: list[str | None] = []
    for clumsy in range(p):
        for name, (direction, x, arguments, says) in bad_calls(p, me, device).items():
            if me == clumsy and hasattr(comm, direction) and name != "meta":
                method = getattr(comm, direction)
                problems.append(
                    refusal(name, lambda m=method, x=x, a=arguments: m(x, **a), (ValueError, TypeError), says)
                )
        problems += works(comm, members, me, device)
    comm.close()
    return [problem for problem in problems if problem]


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_rank_corrects_itself(pool: ranks.RankPool, backend: str) -> None:
    ok(pool.run(run_one_rank_corrects_itself, MEMBERS[3], backend, "cpu"))


# ---- ranks that disagree


def steps(
    p: int, me: int, device: str
) -> dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], tuple[str, ...]]]:
    """Name -> (what most ranks submit, what one rank submits, the names of the group)."""

    def x(b: int = 1, s: int = 4, h: int = 2 * p, d: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(b, s, h, d, dtype=dtype, device=device)

    q, k, v = ({"x": x(), "tag": tag} for tag in "qkv")
    halves = tuple((2 * r, 2 * r + 2) for r in range(p))
    moved = tuple((2 * r + (r > 0), 2 * r + 2 + (r < p - 1)) for r in range(p))
    lens = (4,) * p
    other_lens = tuple(4 if r == me else 5 for r in range(p))
    return {
        "sequence": ([q, k], [{"x": x(s=5), "tag": "q"}, k], ()),
        "sequence of the second": ([q, k], [q, {"x": x(s=5), "tag": "k"}], ()),
        "batch": ([q], [{"x": x(b=2), "tag": "q"}], ()),
        "heads": ([q], [{"x": x(h=3 * p), "tag": "q"}], ()),
        "head_dim": ([q], [{"x": x(d=4), "tag": "q"}], ()),
        "dtype of the same size": ([q], [{"x": x(dtype=torch.int32), "tag": "q"}], ()),
        "dtype of another size": ([q], [{"x": x(dtype=torch.bfloat16), "tag": "q"}], ()),
        "plan": ([{**q, "heads": halves}], [{**q, "heads": moved}], ()),
        "lengths": ([{**q, "seq_lens": lens}], [{**q, "seq_lens": other_lens}], ()),
        "tag": ([q], [{**q, "tag": "p"}], ()),
        "tag of the last": ([q, k], [q, {**k, "tag": "p"}], ()),
        "order": ([q, k, v], [k, q, v], ()),
        "order of the last": ([v, q, k], [v, k, q], ("q", "k", "v")),
        "number": ([q, k, v], [q, k], ()),
        "direction": ([q], [{"x": x(s=4 * p, h=2), "tag": "q", "direction": "gather_heads"}], ()),
        "requires_grad": ([q], [{"x": x().requires_grad_(), "tag": "q"}], ()),
        "requires_grad of the last": ([q, k], [q, {"x": x().requires_grad_(), "tag": "k"}], ()),
    }


def run_mismatch(
    rank: int,
    world_size: int,
    members: tuple[int, ...],
    backend: str,
    device: str,
    name: str,
    odd: int,
    rounds: tuple[bool, ...] = (True, False),
) -> list[str] | None:
    """Rank `odd` submits something else, in `rounds` that say False. No rank gets data; all get an error of this
    package."""
    group = ranks.fresh_group(members)
    if group is None:
        return None
    me, p = members.index(rank), len(members)
    comm = ranks.fresh_communicator(group, backend, device, timeout_s=2.0)
    problems = []
    for warm in rounds:
        # A rank that is still in the group before would learn there that its peers have failed.
        ranks.meet(group)
        most, other, names = steps(p, me, device)[name]
        submissions = most if warm or me != odd else other
        try:
            with comm.group(*names) as exchanges:
                for submission in submissions:
                    exchanges.submit(**submission)
                exchanges.wait()
            arrive(device, comm)
            if not warm:
                problems.append("the ranks disagree, and this one got results")
        except UlyssesError as error:
            if warm:
                problems.append(f"before the mismatch: {error!r}")
            elif name not in NEW_TARGETS and not isinstance(error, MismatchError):
                problems.append(f"{error!r} where a MismatchError is due")
    try:
        comm.scatter_heads(torch.zeros(1, 2, p, 4, device=device))
        problems.append("the communicator still exchanges after a mismatch")
    except UlyssesError:
        pass
    comm.close()
    return problems


def run_mismatch_message(
    rank: int, world_size: int, members: tuple[int, ...], backend: str, of: dict[str, Any], known: bool
) -> str | None:
    """What rank 1 reads when it submits ``of`` its own: for the first time, or what all have exchanged before."""
    group = ranks.fresh_group(members)
    if group is None:
        return None
    own = {"shape": (1, 3, 4, 8), "dtype": torch.float32, "tag": "q", **(of if rank == 1 else {})}
    comm = ranks.fresh_communicator(group, backend, timeout_s=5.0)
    x = torch.zeros(own["shape"], dtype=own["dtype"])
    if known:
        for tag in ("q", "k"):
            with comm.group(tag) as exchanges:
                exchanges.submit(x, tag=tag)
                exchanges.wait()
    text = ""
    try:
        with comm.group(own["tag"]) as exchanges:
            exchanges.submit(x, tag=own["tag"])
            exchanges.wait()
    except MismatchError as error:
        text = str(error)
    comm.close()
    return text


@pytest.mark.parametrize("backend", ["shm", "c10d"])
@pytest.mark.parametrize(
    ("of", "told"),
    [
        ({"shape": (1, 2, 4, 8)}, "in seq_lens: {(3, 3)|(2, 2)}: where lengths are uneven, pass the same seq_lens="),
        ({"shape": (1, 3, 4, 6)}, "in D: {8|6}"),
        ({"shape": (1, 3, 8, 8)}, "in H: {4|8}; in heads: {((0, 2), (2, 4))|((0, 4), (4, 8))}"),
        ({"dtype": torch.int32}, "in dtype: {torch.float32|torch.int32}"),
    ],
    ids=["lengths", "head dimension", "heads", "dtype"],
)
def test_ranks_that_disagree_for_the_first_time_tell_in_what(
    pool: ranks.RankPool, backend: str, of: dict[str, Any], told: str
) -> None:
    first, second, *_ = pool.run(run_mismatch_message, (0, 1), backend, of, False)
    wanted = [
        re.sub(r"{(.*?)\|(.*?)}", rf"\{here} here, \{there} on rank {peer}", told)
        for here, there, peer in ((1, 2, 1), (2, 1, 0))
    ]
    for text, own in ((first, wanted[0]), (second, wanted[1])):
        # The slower one may hear of it from the other.
        found = [each for each in wanted if f"they differ {each}" in text]
        assert found == [own] or ("a peer gave up" in text and found), text
        assert "Exchange(" not in text


@pytest.mark.parametrize("backend", ["shm", "c10d"])
def test_ranks_that_disagree_later_tell_what_they_submitted(pool: ranks.RankPool, backend: str) -> None:
    first, second, *_ = pool.run(run_mismatch_message, (0, 1), backend, {"tag": "k"}, True)
    for text, own, other in ((first, "'q'", "'k'"), (second, "'k'", "'q'")):
        if backend == "shm":
            assert "submitted another tag" in text and f"this rank: tag {own}" in text and "D 8" in text, text
        else:
            assert f"they differ in tag: {own} here, {other} on rank" in text, text


def run_without_memory(rank: int, world_size: int, members: tuple[int, ...], backend: str) -> list[str] | None:
    """Tensors whose elements are nowhere, and lengths that change in place."""
    if rank not in members:
        return None
    me, p = members.index(rank), len(members)
    comm = ranks.communicator(members, backend)
    freed = torch.zeros(1, 2, p, 4)
    freed.untyped_storage().resize_(0)

    def submit(x: torch.Tensor) -> torch.Tensor:
        with comm.group("q") as group:
            group.submit(x, tag="q")
        return x

    nowhere: dict[str, Callable[[], Any]] = {
        "freed storage": lambda: submit(freed),
        "zero tensor": lambda: submit(torch._efficientzerotensor((1, 2, p, 4))),
        "functional": lambda: torch.func.functionalize(submit)(torch.zeros(1, 2, p, 4)),
    }
    problems = [refusal(name, call, (TypeError,), "no memory of its own") for name, call in nowhere.items()]
    lengths = torch.arange(p)
    for start in (1, 2):
        lengths[:] = (torch.arange(p) + start) % (p + 1)
        own = int(lengths[me])
        whole = torch.zeros(1, int(lengths.sum()), 1, 2)
        with comm.group("o") as group:
            group.submit(whole, tag="o", direction="gather_heads", seq_lens=lengths)
            (result,) = group.wait()
        if result.shape[1] != own:
            problems.append(f"{result.shape[1]} tokens where {own} are due")
    return [problem for problem in problems if problem]


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_without_memory_and_lengths_that_change(pool: ranks.RankPool, backend: str) -> None:
    ok(pool.run(run_without_memory, MEMBERS[2], backend))


MISMATCHES = list(steps(2, 0, "cpu"))
# Here the odd rank needs a target that the others know nothing of, and may find itself alone in its rendezvous first.
NEW_TARGETS = ("tag", "tag of the last", "direction", "dtype of the same size", "dtype of another size")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatch(pool: ranks.RankPool, name: str, backend: str) -> None:
    ok(pool.run(run_mismatch, MEMBERS[2], backend, "cpu", name, 1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("world_size", "odd"), [(3, 0), (3, 2), (4, 1)])
@pytest.mark.parametrize("name", ["sequence", "tag of the last", "number"])
def test_mismatch_of_more_ranks(pool: ranks.RankPool, name: str, world_size: int, odd: int, backend: str) -> None:
    ok(pool.run(run_mismatch, MEMBERS[world_size], backend, "cpu", name, odd))


def run_method_mismatch(rank: int, world_size: int, members: tuple[int, ...], backend: str) -> list[str] | None:
    """Methods on one rank, another method or a group on the other."""
    groups = [ranks.fresh_group(members) for _ in range(6)]
    if rank not in members:
        return None
    me, p = members.index(rank), len(members)
    x = torch.zeros(1, p, p, 4)

    def in_group(comm: Communicator) -> None:
        with comm.group("q") as group:
            group.submit(x, tag="q", final=True)
            group.wait()

    calls: list[Callable[[Communicator], Any]] = [
        lambda comm: comm.scatter_heads(x),
        lambda comm: comm.gather_heads(x),
        lambda comm: comm.scatter_heads(x.double()),
        in_group,
    ]
    problems = []
    for group, (one, other) in zip(groups, itertools.combinations(calls, 2), strict=True):
        comm = ranks.fresh_communicator(group, backend, timeout_s=2.0)
        try:
            (one if me == 0 else other)(comm)
            problems.append(f"calls {calls.index(one)} and {calls.index(other)} met")
        except UlyssesError:
            pass
        comm.close()
    return problems


@pytest.mark.parametrize("backend", BACKENDS)
def test_mismatch_of_calls(pool: ranks.RankPool, backend: str) -> None:
    ok(pool.run(run_method_mismatch, MEMBERS[2], backend))
