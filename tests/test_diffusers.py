"""Transformers of diffusers, split over ranks, against themselves unsplit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import diffusers_models
import pytest
import ranks
import torch
import torch.distributed as dist

diffusers = pytest.importorskip("diffusers")

MEMBERS = {2: (0, 1), 3: (0, 1, 2), 4: (0, 1, 2, 3)}
# (tokens, batch, heads): what divides; what does not, with guidance's batch of two; heads that do not either.
SIZES = [(16, 1, 4), (13, 2, 4), (13, 2, 3)]
NAMES = list(diffusers_models.MODELS)
if not hasattr(diffusers, "MiniMaxH3Transformer3DModel"):  # 0.38
    NAMES.remove("minimax_h3")


def deviation(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((actual - wanted).abs().max() / wanted.abs().max())


def run_model(
    rank: int,
    world_size: int,
    members: tuple[int, ...],
    name: str,
    size: tuple[int, int, int],
    device: str = "cpu",
    backend: str = "shm",
    how: str = "eager",
) -> dict[str, Any] | None:
    """Forwards of a model, unsplit, split and given back; ``how`` it is run: eager, compiled, or otherwise."""
    from ulysses_op.integrations.diffusers import parallelize

    if rank not in members:
        return None
    at = ranks.device_of(device)
    model, inputs = diffusers_models.make(name, *size)
    model, inputs = model.to(at), diffusers_models.moved(inputs, at)
    comm = ranks.communicator(members, backend, device)
    errors = []
    with torch.no_grad():
        dense = model(**inputs)[0]
        with parallelize(model, comm):
            called = diffusers_models.compiled(model, how)
            for _ in range(3):
                out = called(**inputs)[0]
                errors.append(deviation(out, dense))
        again = 0.0 if how == "blocks" else deviation(model(**inputs)[0], dense)  # blocks stay compiled
    return {"error": max(errors), "again": again, "backend": comm.backend, "sum": float(out.double().sum())}


def check(answers: list[dict[str, Any] | None], world_size: int, backend: str = "shm", limit: float = 1e-4) -> None:
    taken = [answer for answer in answers if answer is not None]
    assert len(taken) == world_size
    for answer in taken:
        assert answer["error"] <= limit, answers
        assert answer["again"] == 0.0, answers
        assert answer["backend"] == backend
        assert answer["sum"] == taken[0]["sum"]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_split_model_is_the_model(pool: ranks.RankPool, name: str, world_size: int, size: tuple[int, int, int]) -> None:
    check(pool.run(run_model, MEMBERS[world_size], name, size), world_size)


@pytest.mark.parametrize("name", ["wan", "wan_by_token", "flux_short_text", "qwen", "qwen_short_text", "hunyuan_video"])
def test_there_may_be_fewer_tokens_than_ranks(pool: ranks.RankPool, name: str) -> None:
    for length in (1, 2):
        check(pool.run(run_model, MEMBERS[4], name, (length, 2, 4)), 4)


@pytest.mark.parametrize("name", ["wan", "flux"])
def test_it_runs_on_c10d(pool: ranks.RankPool, name: str) -> None:
    check(pool.run(run_model, MEMBERS[3], name, (13, 2, 4), "cpu", "c10d"), 3, "c10d")


def run_without_exchange(rank: int, world_size: int, members: tuple[int, ...], name: str) -> float | None:
    from ulysses_op.integrations.diffusers import attention, parallelize

    if rank not in members:
        return None
    model, inputs = diffusers_models.make(name, 13, 2)
    attend = attention.UlyssesAttention.attend

    def attend_locally(self: Any, inner: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rest: Any) -> Any:
        return attention.attention(inner, q, k, v, {})

    with torch.no_grad():
        dense = model(**inputs)[0]
        attention.UlyssesAttention.attend = attend_locally  # type: ignore[method-assign]
        try:
            with parallelize(model, ranks.communicator(members, "shm")):
                return deviation(model(**inputs)[0], dense)
        finally:
            attention.UlyssesAttention.attend = attend  # type: ignore[method-assign]


@pytest.mark.parametrize("name", NAMES)
def test_without_the_exchange_it_is_another(pool: ranks.RankPool, name: str) -> None:
    answers = pool.run(run_without_exchange, MEMBERS[2], name)
    assert min(answer for answer in answers if answer is not None) > 1e-3, answers


def events_of(model: torch.nn.Module, inputs: dict[str, Any], comm: Any) -> list[str]:
    """What one forward does in its first block's self-attention: submissions by tag, and modules by name."""
    events: list[str] = []
    handles = []
    for name in ("to_q", "to_k", "to_v", "norm_q", "norm_k"):
        module = model.get_submodule(f"blocks.0.attn1.{name}")
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: events.append(name)))
    submit = comm._submit

    def record(group: Any, x: Any, step: Any) -> Any:
        events.append(f"submit {step.tag}")
        return submit(group, x, step)

    comm._submit = record
    try:
        model(**inputs)
    finally:
        del comm._submit
        for handle in handles:
            handle.remove()
    return events[: events.index("submit o") + 1]


def run_early_values(rank: int, world_size: int, members: tuple[int, ...]) -> list[list[str]] | None:
    from ulysses_op.integrations.diffusers import parallelize

    if rank not in members:
        return None
    model, inputs = diffusers_models.make("wan", 13, 2)
    comm = ranks.communicator(members, "shm")
    found = []
    with torch.no_grad(), parallelize(model, comm):
        found = [events_of(model, inputs, comm) for _ in range(2)]
        for block in model.blocks:
            block.attn1.fuse_projections()
    with torch.no_grad(), parallelize(model, comm):
        found += [events_of(model, inputs, comm) for _ in range(2)]
    return found


def test_values_leave_before_queries_and_keys_are_normed(pool: ranks.RankPool) -> None:
    projected = ["to_q", "to_k", "to_v"]
    normed = ["norm_q", "norm_k"]
    rest = ["submit q", "submit k", "submit o"]
    found = pool.run(run_early_values, MEMBERS[2])
    # The first forward finds out where the values are.
    expected = [
        [*projected, *normed, "submit v", *rest],
        [*projected, "submit v", *normed, *rest],
        [*normed, "submit v", *rest],
        ["submit v", *normed, *rest],
    ]
    assert found == [expected, expected, None, None]


class _Doubled(torch.nn.Module):
    """A projection with something added behind it, as adapters do it."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(x)


def run_with_adapter(
    rank: int, world_size: int, members: tuple[int, ...], device: str = "cpu", backend: str = "shm"
) -> list[float] | None:
    from ulysses_op.integrations.diffusers import parallelize

    if rank not in members:
        return None
    at = ranks.device_of(device)
    model, inputs = diffusers_models.make("wan", 13, 2)
    other, _ = diffusers_models.make("wan", 13, 2)
    model, other, inputs = model.to(at), other.to(at), diffusers_models.moved(inputs, at)
    for block in other.blocks:
        block.attn1.to_v = _Doubled(block.attn1.to_v)
    found = []
    with torch.no_grad(), parallelize(model, ranks.communicator(members, backend, device)):
        for _ in range(2):
            model(**inputs)
        for block in model.blocks:
            block.attn1.to_v = _Doubled(block.attn1.to_v)
        for _ in range(2):
            found.append(deviation(model(**inputs)[0], other(**inputs)[0]))
    return found


def test_values_that_are_changed_behind_their_projection_do_not_leave_early(pool: ranks.RankPool) -> None:
    for answer in pool.run(run_with_adapter, MEMBERS[2])[:2]:
        assert max(answer) <= 1e-5


def run_gradients(rank: int, world_size: int, members: tuple[int, ...], name: str, checkpointed: bool) -> float | None:
    from ulysses_op.integrations.diffusers import parallelize

    if rank not in members:
        return None
    group = ranks.group_of(members)
    model, inputs = diffusers_models.make(name, 13, 2)
    weight = torch.randn(model(**inputs)[0].shape, generator=torch.Generator().manual_seed(1))

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        (model(**inputs)[0] * weight).sum().backward()
        return {key: x.grad.clone() for key, x in model.named_parameters() if x.grad is not None}

    dense = gradients()
    if checkpointed:
        model.enable_gradient_checkpointing()
    with parallelize(model, ranks.communicator(members, "shm")):
        for _ in range(2):
            split = gradients()
    assert split.keys() == dense.keys()
    # Some are nothing but rounding, as those of a bias that all keys have: against the largest of all.
    scale = max(float(gradient.abs().max()) for gradient in dense.values())
    worst = 0.0
    for key, share in split.items():
        dist.all_reduce(share, group=group)
        worst = max(worst, float((share - dense[key]).abs().max()) / scale)
    return worst


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", ["wan", "flux", "hunyuan_video", "qwen_short_text"])
def test_shares_of_gradients_add_up(pool: ranks.RankPool, name: str, checkpointed: bool) -> None:
    answers = pool.run(run_gradients, MEMBERS[3], name, checkpointed)
    assert max(answer for answer in answers if answer is not None) <= 1e-4, answers


def run_given_back(rank: int, world_size: int) -> list[str]:
    """What is left of a split model after remove()."""
    from diffusers.models import attention_dispatch

    from ulysses_op.integrations.diffusers import parallelize

    registry = attention_dispatch._AttentionBackendRegistry
    model, inputs = diffusers_models.make("flux", 13, 2)
    model.set_attention_backend("_native_math")

    def state() -> Any:
        tables = [set(table) for table in (registry._backends, registry._constraints, registry._supported_arg_names)]
        hooks = [
            (name, len(module._forward_hooks), len(module._forward_pre_hooks), len(module._forward_hooks_always_called))
            for name, module in model.named_modules()
        ]
        return tables, hooks, [vars(module.processor) for module in model.modules() if hasattr(module, "processor")]

    before = state()
    split = parallelize(model)
    with torch.no_grad():
        model(**inputs)
    communicator = split.communicator
    split.remove()
    split.remove()
    found = [] if state() == before else ["the model differs"]
    try:
        communicator.scatter_heads(torch.zeros(1, 1, 2, 1))
        found.append("the communicator is open")
    except RuntimeError:
        pass
    return found


def test_remove_leaves_nothing() -> None:
    assert ranks.pool(2).run(run_given_back) == [[], []]


def run_shared_processor(rank: int, world_size: int, members: tuple[int, ...], name: str) -> dict[str, Any] | None:
    """One processor in all attentions of a model, also in those that need no exchange."""
    from ulysses_op.integrations.diffusers import parallelize

    if rank not in members:
        return None
    model, inputs = diffusers_models.make(name, 13, 2)
    processor = next(iter(model.attn_processors.values()))
    model.set_attn_processor(processor)
    comm = ranks.communicator(members, "shm")
    with torch.no_grad():
        dense = model(**inputs)[0]
        with parallelize(model, comm):
            out = model(**inputs)[0]
        again = deviation(model(**inputs)[0], dense)
    assert all(one is processor for one in model.attn_processors.values())
    return {"error": deviation(out, dense), "again": again, "backend": comm.backend, "sum": float(out.double().sum())}


@pytest.mark.parametrize("name", ["ltx", "flux"])
def test_attentions_may_share_a_processor(pool: ranks.RankPool, name: str) -> None:
    check(pool.run(run_shared_processor, MEMBERS[2], name), 2)


def run_refusals(rank: int, world_size: int) -> list[str]:
    from ulysses_op.integrations.diffusers import Plan, Split, parallelize

    comm = ranks.communicator((0, 1), "shm")
    model, inputs = diffusers_models.make("wan", 13, 2)
    told = []

    def refuse(act: Callable[[], object]) -> None:
        try:
            act()
        except (ValueError, RuntimeError, TypeError, AttributeError) as error:
            told.append(str(error))
        else:
            told.append("nothing was refused")

    refuse(lambda: parallelize(torch.nn.Linear(2, 2), comm))
    refuse(lambda: parallelize(torch.nn.Linear(2, 2), comm, plan=Plan(gathers=("",))))
    refuse(lambda: parallelize(model, comm, plan=Plan(gathers=("proj_in",))))
    refuse(lambda: parallelize(model, comm, plan=Plan(gathers=(), inputs={"blocks.0": {"hidden": Split(1, 3)}})))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    refuse(lambda: parallelize(torch.compile(model), comm))
    with parallelize(model, comm):
        refuse(lambda: copy.deepcopy(model))
        refuse(lambda: parallelize(model, comm))
        model.set_attention_backend("native")
        with torch.no_grad():
            refuse(lambda: model(**inputs))
    with parallelize(model, comm), torch.no_grad():
        model.set_attn_processor(type(model.blocks[0].attn1.processor)())
        refuse(lambda: model(**inputs))
    with parallelize(model, comm, plan=Plan(gathers=("proj_out",))), torch.no_grad():
        refuse(lambda: model(**inputs))
    hunyuan, _ = diffusers_models.make("hunyuan_video", 13, 2)
    hunyuan.register_to_config(image_condition_type="token_replace")
    refuse(lambda: parallelize(hunyuan, comm))
    refuse(lambda: parallelize(type("LTX2VideoTransformer3DModel", (torch.nn.Module,), {})(), comm))
    pipe: Any = type("WanPipeline", (), {"transformer": model})()
    refuse(lambda: parallelize(pipe, comm))
    refuse(lambda: parallelize("wan", comm))  # type: ignore[arg-type]
    for plan in (1, {"blocks": 1}, {"": {"timestep": 1}}):
        refuse(lambda plan=plan: parallelize(model, comm, plan=plan))  # type: ignore[misc]
    refuse(lambda: Plan(gathers="proj_out"))
    refuse(lambda: Plan(gathers=("proj_out",), inputs={"": {"timestep": 1}}))  # type: ignore[dict-item]
    return told


def run_first_block_cache(rank: int, world_size: int) -> list[str]:
    """Enabled before parallelize(), and after."""
    from ulysses_op.integrations.diffusers import parallelize

    comm = ranks.communicator((0, 1), "shm")
    model, inputs = diffusers_models.make("wan", 13, 2)
    told = []
    config = diffusers.FirstBlockCacheConfig(threshold=0.1)
    with torch.no_grad():
        dense = model(**inputs)[0]
        model.enable_cache(config)
        with pytest.raises(ValueError) as before:
            parallelize(model, comm)
        told.append(str(before.value))
        model.disable_cache()
        with parallelize(model, comm):
            model.enable_cache(config)
            with pytest.raises(ValueError) as after:
                model(**inputs)
            told.append(str(after.value))
            model.disable_cache()
            assert deviation(model(**inputs)[0], dense) <= 1e-4
    return told


def test_a_cache_that_ranks_would_use_differently_is_refused() -> None:
    for told in ranks.pool(2).run(run_first_block_cache):
        assert all("WanTransformer3DModel has diffusers' FirstBlockCache" in text for text in told) and len(told) == 2


def run_given_plan(rank: int, world_size: int, members: tuple[int, ...], stated: bool) -> dict[str, Any] | None:
    """A plan that is passed: the class' own in diffusers' form, or one in ours."""
    from ulysses_op.integrations.diffusers import Plan, Split, parallelize

    if rank not in members:
        return None
    model, inputs = diffusers_models.make("wan", 13, 2)
    plan = Plan(
        gathers=["proj_out"],
        inputs={"blocks.0": {"hidden_states": Split(1, 3)}},
        outputs={"rope": {0: Split(1, 4), 1: Split(1, 4)}},
    )
    comm = ranks.communicator(members, "shm")
    with torch.no_grad():
        dense = model(**inputs)[0]
        with parallelize(model, comm, plan=type(model)._cp_plan if stated else plan) as split:
            out = model(**inputs)[0]
            assert repr(split) == f"Parallelized(WanTransformer3DModel, Communicator(rank {comm.rank} of 2, shm))"
        assert repr(split) == "Parallelized(WanTransformer3DModel, removed)"
        again = deviation(model(**inputs)[0], dense)
    return {"error": deviation(out, dense), "again": again, "backend": comm.backend, "sum": float(out.double().sum())}


@pytest.mark.parametrize("stated", [False, True])
def test_a_plan_can_be_passed(pool: ranks.RankPool, stated: bool) -> None:
    check(pool.run(run_given_plan, MEMBERS[2], stated), 2)


def test_what_cannot_be_split_is_refused() -> None:
    for told in ranks.pool(2).run(run_refusals):
        for text, words in zip(
            told,
            (
                "Linear has no context-parallel plan",
                "Linear has no attention",
                "names the module 'proj_in'",
                "splits 'hidden' of 'blocks.0'",
                "this is what torch.compile returned",
                "cannot be copied",
                "is split already",
                "set_attention_backend() before parallelize()",
                "was given another processor",
                "an attention has 13 queries",
                "token_replace",
                "attends from audio",
                "this is a WanPipeline: pass its transformer, parallelize(pipe.transformer)",
                "this is a str: a transformer of diffusers, a torch.nn.Module, is needed",
                "plan is 1: expected a Plan of ulysses_op.integrations.diffusers, or a dict",
                "plan['blocks'] is 1: expected diffusers' ContextParallelOutput",
                "plan['']['timestep'] is 1: expected diffusers' ContextParallelInput",
                "gathers of a plan is 'proj_out': expected a sequence of names",
                "inputs['']['timestep'] of a plan is 1: expected a Split",
            ),
            strict=True,
        ):
            assert words in text, told


def run_two_models(rank: int, world_size: int, members: tuple[int, ...]) -> list[float] | None:
    from ulysses_op.integrations.diffusers import parallelize

    if rank not in members:
        return None
    comm = ranks.communicator(members, "shm")
    pairs = [diffusers_models.make("wan", 13, 2, heads=4), diffusers_models.make("flux", 9, 1, heads=6)]
    with torch.no_grad():
        dense = [model(**inputs)[0] for model, inputs in pairs]
        with parallelize(pairs[0][0], comm), parallelize(pairs[1][0], comm):
            found = []
            for _ in range(3):
                found += [deviation(model(**inputs)[0], one) for (model, inputs), one in zip(pairs, dense, strict=True)]
    return found


def test_models_with_other_heads_share_a_communicator(pool: ranks.RankPool) -> None:
    for answer in pool.run(run_two_models, MEMBERS[3])[:3]:
        assert max(answer) <= 1e-4


def run_that_fails(rank: int, world_size: int) -> tuple[str, str]:
    """A rank whose keys' norm raises while its values are on their way."""
    from ulysses_op.integrations.diffusers import parallelize

    model, inputs = diffusers_models.make("wan", 13, 2)
    told = []
    with torch.no_grad(), parallelize(model, ranks.fresh_communicator((0, 1), "shm", timeout_s=30.0)):
        for _ in range(2):
            model(**inputs)
        if rank == 1:

            def fail(*_: Any) -> None:
                raise ArithmeticError("no norm today")

            model.blocks[1].attn1.norm_k.register_forward_pre_hook(fail)
        for _ in range(2):
            try:
                model(**inputs)
            except Exception as error:
                told.append(f"{type(error).__name__}: {error}")
    return told[0], told[1]


def test_an_error_behind_early_values_reaches_all_ranks() -> None:
    first, second = ranks.pool(2).run(run_that_fails)
    assert "PeerAbortError" in first[0] and "ended without the attention" in first[0]
    assert first[1].startswith("BrokenCommunicatorError") or "PeerAbortError" in first[1]
    assert "ArithmeticError" in second[0]
    assert "BrokenCommunicatorError" in second[1] or "ended without" in second[1]


@pytest.mark.gpu
@pytest.mark.skipif(not ranks.DEVICES, reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ranks.ONE_SIDED_ON_CUDA)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_split_model_is_the_model_on_gpus(name: str, size: tuple[int, int, int], backend: str) -> None:
    check(ranks.pool(2, "cuda").run(run_model, MEMBERS[2], name, size, "cuda", backend), 2, backend)


@pytest.mark.gpu
@pytest.mark.skipif(not ranks.DEVICES, reason="needs a CUDA device")
def test_values_leave_early_on_gpus() -> None:
    found = ranks.pool(2, "cuda").run(run_with_adapter, MEMBERS[2], "cuda", ranks.PREFERRED_ON_CUDA)
    assert max(error for answer in found for error in answer) <= 1e-5
