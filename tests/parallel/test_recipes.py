"""Low precision over ranks: the values of the layer that has all experts, or of one that has a share of each.

    ep     the plain layer with the tokens of all ranks, one rank after another: every expert sees the same rows
    etp    the sum of plain layers, each with its share of F, quantised on its own

Legend: B batch, L positions, D model dim, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from helpers.comparing import full_value, relative_error
from helpers.ranks import run_ranks
from trimtab.experts.recipes import MXFP8, FP8Blockwise, FP8Current, FP8Delayed, FP8Rowwise
from trimtab.moe import MoE, MoEConfig
from trimtab.parallel.ddp import ddp
from trimtab.parallel.expert_parallel import ExpertParallel, parallelize
from trimtab.parallel.fsdp import fully_shard_moe
from trimtab.routing.config import RouterConfig

E, D, F, STEPS = 4, 32, 64, 2
RECIPES = (FP8Current, FP8Delayed, FP8Rowwise, FP8Blockwise, MXFP8)


def config(**more: Any) -> MoEConfig:
    return MoEConfig(**{"dim": D, "hidden": F, "router": RouterConfig(num_experts=E, top_k=2)} | more)


def tokens(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """(x, dy) [B, L, D], other sizes on other ranks; none on rank 0 in the second step."""
    g = torch.Generator().manual_seed(10 * rank + step)
    shape = (1, 0 if rank == 0 and step else 9 + 4 * rank, D)
    return torch.randn(shape, generator=g), torch.randn(shape, generator=g)


def plain(recipe: Any, share: int | None, ranks: int) -> MoE:
    """The whole layer; with `share` that part of F of a layer that has no recipe otherwise."""
    torch.manual_seed(3)
    whole = config(recipe=recipe if share is None else None).build()
    if share is None:
        return whole
    part = config(recipe=recipe, hidden=F // ranks).build()
    with torch.no_grad():
        part.router.weight.copy_(whole.router.weight)
        part.experts.gate_up.copy_(whole.experts.gate_up.chunk(ranks, 2)[share])
        part.experts.down.copy_(whole.experts.down.chunk(ranks, 2)[share])
    return part


def truth(recipe: Any, split: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """y of all tokens by step, and gradients of the sum over ranks and steps."""
    ranks = dist.get_world_size()
    parts = [plain(recipe, share, ranks) for share in (range(ranks) if split else [None])]
    ys = []
    for step in range(STEPS):
        x, dy = (torch.cat(both, 1) for both in zip(*(tokens(r, step) for r in range(ranks)), strict=True))
        y = torch.stack([part(x).y for part in parts]).sum(0)
        y.backward(dy)
        ys.append(y.detach())
    grads = [{name: p.grad for name, p in part.named_parameters()} for part in parts]
    return ys, {
        "experts.gate_up": torch.cat([g["experts.gate_up"] for g in grads], 2),
        "experts.down": torch.cat([g["experts.down"] for g in grads], 2),
        "router.weight": torch.stack([g["router.weight"] for g in grads]).sum(0),
    }


class Wrapped(nn.Module):
    """The layer as part of a model."""

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x).y


def run(recipe: Any, split: bool, data: str, delay: bool) -> dict[str, float]:
    """Errors of the layer over all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ys, grads = truth(recipe, split)
    torch.manual_seed(3)
    model = Wrapped(config(recipe=recipe, delay_wgrad=delay).build())
    fold = (1, ranks, 1) if split else (1, 1, ranks)
    mesh = init_device_mesh("cpu", fold, mesh_dim_names=("edp", "etp", "ep"))
    style = ExpertParallel(etp="etp" if split else None)
    parallelize(model, mesh["etp", "ep"] if split else mesh["ep"], {"moe": style})
    dp, runner = init_device_mesh("cpu", (ranks,)), model
    if data == "fsdp":
        runner = fully_shard_moe(model, dp, mesh["edp"])
    elif data == "ddp":
        runner = ddp(model, dp, mesh["edp"])
    errors, counts = {}, [[tokens(r, s)[0].shape[1] for r in range(ranks)] for s in range(STEPS)]
    for step in range(STEPS):
        x, dy = tokens(rank, step)
        y = runner(x)
        y.backward(dy)
        model.moe.experts.backward_dw()
        start = sum(counts[step][:rank])
        errors[f"y{step}"] = relative_error(y, ys[step][:, start : start + y.shape[1]])
    for name, param in model.moe.named_parameters():
        grad = param.grad
        assert grad is not None
        if data == "none" and ".experts." not in f".{name}":
            dist.all_reduce(grad)
        errors[name] = relative_error(full_value(grad) * (1 if data == "none" else ranks), grads[name])
    assert model.moe.experts.recipe_way == "emulated"
    return errors


def histories() -> dict[str, float]:
    """A recipe's state of all experts in state dicts: after a step, and taken over by the plain layer and back."""
    rank, ranks, recipe = dist.get_rank(), dist.get_world_size(), FP8Delayed(backend="emulated", history=4)
    whole, errors = plain(recipe, None, ranks), {}
    whole(torch.cat([tokens(r, 0)[0] for r in range(ranks)], 1))
    model = config(recipe=recipe).build()
    parallelize(model, init_device_mesh("cpu", (ranks,)), {"": ExpertParallel()})
    model.load_state_dict({k: v for k, v in whole.state_dict().items() if "_He" in k}, strict=False)
    for key, value in whole.state_dict().items():
        if "_He" in key:
            shown = model.state_dict()[key]
            assert shown.to_local().data_ptr() == model.get_buffer(key).data_ptr(), "the module's own memory"
            assert model.get_buffer(key).shape == (4, E // ranks)
            errors[f"{key} loaded"] = relative_error(full_value(shown), value)
            model.get_buffer(key).add_(rank)
    model.load_state_dict(model.state_dict())
    back = {k: full_value(v) for k, v in model.state_dict().items()}
    again = config(recipe=recipe).build()
    again.load_state_dict(back)
    for key, value in whole.state_dict().items():
        if "_He" in key:
            of_rank = torch.arange(ranks).repeat_interleave(E // ranks)
            errors[f"{key} back"] = relative_error(again.state_dict()[key], value + of_rank)
    return errors


def run_all() -> dict[str, float]:
    """Every recipe under ep and etp; two of them with the rest."""
    cases = [(r, split, "none", False) for r in RECIPES for split in (False, True)]
    cases += [(FP8Delayed, False, "fsdp", False), (MXFP8, False, "ddp", True), (FP8Current, False, "fsdp", True)]
    errors = {}
    for recipe, split, data, delay in cases:
        for name, error in run(recipe(backend="emulated"), split, data, delay).items():
            errors[f"{recipe.name} {'etp' if split else 'ep'} {data} delayed={delay} {name}"] = error
    return errors


def test_recipes_on_two_ranks() -> None:
    for errors in run_ranks(run_all, 2, deadline=120.0):
        assert len(errors) == 13 * 5
        bad = {name: error for name, error in errors.items() if not error <= 2e-6}
        assert not bad


def test_state_dicts_hold_the_state_of_all_experts() -> None:
    for errors in run_ranks(histories, 2):
        assert len(errors) == 2 * 2 * 3
        assert set(errors.values()) == {0.0}
