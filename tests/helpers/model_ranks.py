"""What each rank runs, `from_pretrained` onto the mesh and then a case; and many cases held against one process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from trimtab.integrations.transformers import QuantizedExpertsConfig, register
from trimtab.integrations.transformers.expert_parallel import TrimtabEP
from trimtab.integrations.transformers.lora import average_replicated
from trimtab.integrations.transformers.model_loads import replicating_dispatchers

from .comparing import full_value
from .families import LOADED_WRONG_WHEN_SHARDED, build_model, experts_modules, model_class, save_model
from .model_case import Case, Outcome, Router, balance, prepare, run
from .model_truth import FLOAT64_UNSHARDABLE, in_one_process, judge
from .ranks import run_ranks

REPLICATED = "trimtab_replicated"
"""A name under which replicas are made at once, as many as make ranks equal."""
SEEDS = 5


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
    own in bfloat16 and float16 only. Here a float64 model is float64 throughout before it is sharded, as the truth is.
    """
    from transformers import PreTrainedModel

    distribute = PreTrainedModel.maybe_distribute_model.__func__  # type: ignore[attr-defined]

    def whole(cls: Any, model: Any, *more: Any, **named: Any) -> Any:
        if model.config.dtype == torch.float64:
            model.to(torch.float64)
        return distribute(cls, model, *more, **named)

    PreTrainedModel.maybe_distribute_model = classmethod(whole)  # type: ignore[method-assign, assignment]


def begin() -> None:
    """What a rank does first: the names of trimtab, and no remarks."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # of what FSDP shards over EP
    register()
    register("trimtab_ordered", combine="ordered")
    register("trimtab_shared", transport="shared_memory")
    register(REPLICATED, replicate_experts=0.0, copy_cost=0)


def load(case: Case, folder: str) -> Any:
    """The family's model on the mesh, from a checkpoint that rank 0 writes."""
    from transformers.distributed import DistributedConfig

    if case.ddp:
        model = build_model(case.family, case.seed, case.dtype).to(case.dtype)
        model.set_experts_implementation(case.experts)
        return model
    path = Path(folder, f"{case.family}-{case.seed}")
    if dist.get_rank() == 0 and not path.exists():
        save_model(case.family, path, case.seed)
    dist.barrier()
    mesh = case.mesh
    config = DistributedConfig(
        ep_size=mesh.ep, fsdp_size=mesh.fsdp, tp_size=mesh.tp, dp_replicate_size=mesh.replicate,
        ep_implementation=case.exchange,
    )  # fmt: skip
    coded = {"quantization_config": QuantizedExpertsConfig(case.codes)} if case.codes else {}
    model = model_class(case.family).from_pretrained(
        path, dtype=case.dtype, experts_implementation=case.experts, distributed_config=config, **coded
    )
    if case.family in LOADED_WRONG_WHEN_SHARDED:
        right = build_model(case.family, case.seed).state_dict()
        for name, p in model.named_parameters():
            if "conv1d" in name:
                mine = distribute_tensor(right[name].to(p.dtype), p.device_mesh, p.placements, src_data_rank=None)
                p.data.copy_(mine)
    return model.eval()


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


def run_case(case: Case, folder: str) -> dict[str, Outcome]:
    """Every pattern of a case on this rank."""
    model = load(case, folder)
    prepare(case, model)
    if case.lora == "attention" or (case.lora and case.mesh.ranks > case.mesh.ep):
        average_replicated(model)
    data_rank = case.mesh.data_rank(dist.get_rank())
    if case.balance:
        values, grads = balance(case, model, data_rank)
        whole = {name: None if grad is None else full_value(grad) for name, grad in grads.items()}
        return {"balance": Outcome(values=values, grads=whole, routing={})}
    router, outcomes, sent = Router(model, case.mesh, case.mesh.ep), {}, set()
    experts_run = TrimtabEP._run_experts

    def noting(ep: Any, rows: Any) -> Tensor:
        sent.add(rows.x_MD.dtype)
        return experts_run(ep, rows)

    for pattern in case.patterns:
        model.zero_grad()
        with patch.object(TrimtabEP, "_run_experts", noting):
            values = run(case, model, router, pattern, data_rank, case.steps)
        found = {name: None if p.grad is None else full_value(p.grad) for name, p in model.named_parameters()}
        check_equal_ranks(case, model)
        outcomes[pattern] = Outcome(values=values, grads=found, routing=router.seen)
    if case.recompute:  # each layer ran twice, or the case shows nothing
        assert router.calls == 2 * len(case.patterns) * case.steps * len(experts_modules(model))
    if case.autocast:  # tokens travel in what is multiplied
        assert sent == {torch.bfloat16 if case.experts.startswith("trimtab") else torch.float32}
    return outcomes


def run_cases(cases: Sequence[Case], folder: str) -> list[dict[str, Outcome]]:
    """One case after the other on this rank; an error names its case."""
    begin()
    reduce_float64_like_float32()
    shard_float64_whole()
    answers = []
    for case in cases:
        try:
            answers.append(run_case(case, folder))
        except Exception as error:
            error.add_note(f"in {case}")
            raise
    return answers


def verify(cases: Sequence[Case], folder: Path | None = None, deadline: float = 300.0) -> None:
    """Runs the cases, all of one number of ranks, and fails with the first bad value of each. Without a folder: in this
    process."""
    pending, problems = list(cases), list[str]()
    for _ in range(SEEDS):  # a near tie in a router may fall either way: then another seed
        if folder is None:
            answers = [[{key: one for key, (one,) in in_one_process(case).items()} for case in pending]]
        else:
            answers = run_ranks(run_cases, pending[0].mesh.ranks, pending, str(folder), deadline=deadline)
        undecided = []
        for case, *of_ranks in zip(pending, *answers, strict=True):
            errors = judge(case, of_ranks)
            if errors is None:
                undecided.append(replace(case, seed=case.seed + 1))
            problems += (errors or [])[:1]
        pending = undecided
        if not pending:
            break
    assert not problems, "\n".join(problems)
    assert not pending, f"no seed among {SEEDS} routes alike, and that is no near tie: {', '.join(map(str, pending))}"


def both_precisions(case: Case) -> list[Case]:
    """The case in float32 and, where it can run, in float64."""
    wide = [] if case.family in FLOAT64_UNSHARDABLE else [replace(case, dtype=torch.float64)]
    return [case, *wide]
