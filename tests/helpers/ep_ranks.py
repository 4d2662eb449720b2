"""What each rank runs: `from_pretrained` onto the mesh, then a forward and backward for each pattern."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import trimtab.integrations.transformers
from trimtab.errors import TrimtabError
from trimtab.integrations.transformers.lora import average_replicated
from trimtab.integrations.transformers.model_loads import replicating_dispatchers

from .ep_case import Case, Router, batches, freeze
from .families import LOADED_WRONG_WHEN_SHARDED, experts_modules, forward, model_class, save_model


def reduce_float64_like_float32() -> None:
    """FSDP2 divides gradients by their factor once in float32 and bfloat16, but twice in any other dtype where its
    group has one rank, as that of the experts has when each rank holds its own. Here float64 takes float32's way.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    factors = collectives._get_gradient_divide_factors

    def divided_once(scatter: Any, reduce: Any, dtype: torch.dtype, *more: Any, **named: Any) -> Any:
        return factors(scatter, reduce, torch.float32 if dtype == torch.float64 else dtype, *more, **named)

    collectives._get_gradient_divide_factors = divided_once  # type: ignore[assignment]


def shard_float64_whole() -> None:
    """Routers of transformers make their weights in float32, and `from_pretrained` gives those an FSDP unit of their
    own in bfloat16 and float16 only. Here a float64 model is float64 throughout before it is sharded, as the reference.
    """
    from transformers import PreTrainedModel

    distribute = PreTrainedModel.maybe_distribute_model.__func__  # type: ignore[attr-defined]

    def whole(cls: Any, model: Any, *more: Any, **named: Any) -> Any:
        if model.config.dtype == torch.float64:
            model.to(torch.float64)
        return distribute(cls, model, *more, **named)

    PreTrainedModel.maybe_distribute_model = classmethod(whole)  # type: ignore[method-assign, assignment]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one pattern left on one rank: outputs, loss and full gradients by name, and the experts of each slot."""

    values: dict[str, Tensor | None]
    routing: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A case on one rank. `weights` are those that were loaded, where they are not those that were saved."""

    outcomes: dict[str, Outcome]
    weights: dict[str, Tensor]


def quiet() -> None:
    """No progress bars, and no remark on how DTensor gathers what FSDP shards over EP."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def full(tensor: Tensor) -> Tensor:
    """A DTensor in one piece; collective."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach()


def quantized_by(case: Case) -> dict[str, Any]:
    """What `from_pretrained` is told of the codes of a case."""
    from trimtab.integrations.transformers import QuantizedExpertsConfig

    return {"quantization_config": QuantizedExpertsConfig(case.codes)} if case.codes else {}


def load(case: Case, folder: str) -> Any:
    """The family's model on the mesh, from a checkpoint that rank 0 writes."""
    from transformers.distributed import DistributedConfig

    path = Path(folder, f"{case.family}-{case.seed}")
    if dist.get_rank() == 0 and not path.exists():
        save_model(case.family, path, case.seed)
    dist.barrier()
    mesh = case.mesh
    config = DistributedConfig(
        ep_size=mesh.ep,
        fsdp_size=mesh.fsdp,
        tp_size=mesh.tp,
        dp_replicate_size=mesh.replicate,
        ep_implementation=case.exchange,
    )
    model = model_class(case.family).from_pretrained(
        path, dtype=case.dtype, experts_implementation=case.experts, distributed_config=config, **quantized_by(case)
    )
    return model.eval()


def router_of(case: Case, model: nn.Module) -> Router:
    """Hooks that know the global number of experts."""
    sizes = {name: int(m.num_experts) * case.mesh.ep for name, m in experts_modules(model).items()}  # type: ignore[call-overload]
    return Router(model, case.mesh, sizes)


def prepare(case: Case, model: Any) -> None:
    """Frozen parameters and recomputation, as the case asks."""
    freeze(case, model)
    if case.lora == "attention" or (case.lora and case.mesh.ranks > case.mesh.ep):
        average_replicated(model)
    if case.recompute:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": case.recompute == "reentrant"})


REPLICATED = "trimtab_replicated"
"""A name under which replicas are made at once, as many as make ranks equal."""


def check_equal_ranks(case: Case, model: nn.Module) -> None:
    """In the last call of each layer no rank had more than its share of rows, with replicas where that needs some."""
    layers = replicating_dispatchers(model)
    assert len(layers) == (len(experts_modules(model)) if case.exchange == REPLICATED else 0)
    for name, (_, dispatcher) in layers.items():
        report = dispatcher.replicated
        assert report is not None, name
        before, after, replicas = (t.tolist() for t in (report.loads_before_P, report.loads_after_P, report.replicas_P))
        assert max(after) == -(-sum(before) // len(before)), (name, before, after)
        assert (sum(replicas) > 0) == (max(before) > max(after)), (name, before, replicas)


def run_case(case: Case, folder: str) -> Answer:
    """Every pattern of a case on this rank."""
    model = load(case, folder)
    prepare(case, model)
    router = router_of(case, model)
    router.data_rank = case.mesh.data_rank(dist.get_rank())
    outcomes = {}
    for pattern in case.patterns:
        router.pattern, router.seen = pattern, {}
        model.zero_grad()
        outputs, losses = [], []
        work = batches(case, model, pattern, router.data_rank)
        for step, batch in enumerate(work):
            if case.unsynced:
                model.set_requires_gradient_sync(step == len(work) - 1)
            output, loss = forward(model, batch)
            (loss / len(work)).backward()
            outputs.append(output.detach())
            losses.append(loss.detach())
        values: dict[str, Tensor | None] = {"output": torch.stack(outputs), "loss": torch.stack(losses)}
        values |= {name: None if p.grad is None else full(p.grad) for name, p in model.named_parameters()}
        check_equal_ranks(case, model)
        outcomes[pattern] = Outcome(values=values, routing=router.seen)
    if case.recompute:  # each layer ran twice, or the case shows nothing
        assert router.calls == 2 * len(case.patterns) * case.steps * len(experts_modules(model))
    weights = {}
    if case.family in LOADED_WRONG_WHEN_SHARDED:
        weights = {name: full(p) for name, p in model.named_parameters()}
    return Answer(outcomes=outcomes, weights=weights)


def run_cases(cases: Sequence[Case], folder: str) -> list[Answer]:
    """One case after the other on this rank; an error names its case."""
    quiet()
    reduce_float64_like_float32()
    shard_float64_whole()
    trimtab.integrations.transformers.register()
    trimtab.integrations.transformers.register("trimtab_ordered", combine="ordered")
    trimtab.integrations.transformers.register("trimtab_shared", transport="shared_memory")
    trimtab.integrations.transformers.register(REPLICATED, replicate_experts=0.0, copy_cost=0)
    answers = []
    for case in cases:
        try:
            answers.append(run_case(case, folder))
        except Exception as error:
            error.add_note(f"in {case}")
            raise
    return answers


def run_loading(cases: Sequence[Case], folder: str) -> list[str]:
    """What `from_pretrained` raises on this rank for each case; nothing is empty."""
    quiet()
    raised = []
    for case in cases:
        try:
            load(case, folder)
        except RuntimeError as error:
            raised.append(str(error))
        else:
            raised.append("")
    return raised


def run_shared(case: Case, folder: str) -> None:
    """All experts modules of a model have one transport, two models have two, and none outlives its model."""
    from transformers.distributed.expert_parallel import EPImplementationInterface

    quiet()
    trimtab.integrations.transformers.register()
    kind: Any = EPImplementationInterface()["trimtab"]
    models = [load(case, folder) for _ in range(2)]
    built = [thing for thing in gc.get_objects() if type(thing) is kind]
    transports = [weakref.ref(ep.dispatcher.transport) for ep in built]
    assert len(built) == sum(len(experts_modules(model)) for model in models) > 2
    assert len({transport() for transport in transports}) == len(models)
    for model in models:  # the names still tell the layers apart
        forward(model, batches(case, model, "natural", dist.get_rank())[0])
    assert len({ep.dispatcher.layer for ep in built}) == len(built)
    dist.barrier()
    del models, model, built
    gc.collect()
    assert {transport() for transport in transports} == {None}


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """What a rank raised, after how many seconds."""

    kind: str
    message: str
    seconds: float


def run_broken(cases: Sequence[Case], faults: Sequence[str], folder: str) -> list[Refusal]:
    """For each case and fault, a forward in which the last rank hands its experts something else than its peers do, or
    has them run by another implementation."""
    quiet()
    trimtab.integrations.transformers.register()
    trimtab.integrations.transformers.register(REPLICATED, replicate_experts=0.0, copy_cost=0)
    guilty = dist.get_rank() == dist.get_world_size() - 1
    found = []
    for case in cases:
        model = load(case, folder)
        for fault in faults:

            def spoil(_: nn.Module, args: tuple[Any, ...], fault: str = fault) -> tuple[Any, ...]:
                hidden, ids, weights = (a.clone() for a in args)
                if fault == "id too large":
                    ids[0, 0] = 10_000
                elif fault == "id negative":
                    ids[-1, -1] = -2
                elif fault == "weight not a number":
                    weights[0, 0] = torch.nan
                elif fault == "another top-k":
                    ids, weights = ids[:, :1], weights[:, :1]
                return hidden, ids, weights

            module = next(iter(experts_modules(model).values()))
            hook = module.register_forward_pre_hook(spoil) if guilty else None
            batch = batches(case, model, "natural", dist.get_rank())[0]
            begin, refusal = time.monotonic(), Refusal(kind="", message="nothing was raised", seconds=0.0)
            if fault == "all eager" or (fault == "one eager" and guilty):
                module.config._experts_implementation = "eager"  # the model's setter passes over classes of FSDP
            try:
                forward(model, batch)
            except TrimtabError as error:
                refusal = Refusal(kind=type(error).__name__, message=str(error), seconds=time.monotonic() - begin)
            module.config._experts_implementation = case.experts
            found.append(refusal)
            if hook is not None:
                hook.remove()
    return found
