"""Selective checkpointing of layers over ranks, by policies that keep collectives and what they bring; and compiled."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from helpers.comparing import relative_error
from helpers.layout_truth import D, Model, build, spread
from helpers.ranks import run_ranks
from trimtab.dispatch.options import COMBINE_MODES
from trimtab.experts.activations import ACTIVATIONS
from trimtab.moe import MoEConfig
from trimtab.parallel.expert_parallel import ExpertParallel, parallelize
from trimtab.parallel.fsdp import fully_shard_moe
from trimtab.routing.config import RouterConfig
from trimtab.routing.losses import LossGroups
from trimtab.routing.recompute import replay_in_recompute

KEPT = (
    ["mm"], ["cat", "clone"], ["allreduce_"], ["alltoall_base_"], ["_allgather_base_"], ["view", "lift_fresh"],
    ["new_empty", "copy_"], ["scatter_add", "empty"],
)  # fmt: skip


def policy(kept: Sequence[str], _c: object, op: Any, *_a: object, **_k: object) -> CheckpointPolicy:
    keeps = op.name().split("::")[1].split(".")[0] in kept
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def selecting(kept: Sequence[str]) -> dict[str, Any]:
    """Options of a checkpoint that keeps these operators' results."""
    selective = partial(create_selective_checkpoint_contexts, partial(policy, kept))
    return {"use_reentrant": False, "context_fn": partial(replay_in_recompute, selective)}


def gradients(model: Model, kept: Sequence[str] | None) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(7 + dist.get_rank())
    x = torch.randn(2, 3, D, requires_grad=True)
    y, losses = model(x) if kept is None else checkpoint(model, x, **selecting(kept))
    (y.square().sum() + losses).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [x.grad.clone(), *(getattr(g, "_local_tensor", g).clone() for g in found)]  # type: ignore[union-attr]


def selective_on_rank(replicate_experts: Any) -> dict[str, float]:
    gaps = {}
    for etp in (False, True):
        model = build(torch.float32)
        spread(model, "layers.*.moe", etp, replicate_experts=replicate_experts, copy_cost=0)
        for layer in model.layers:
            layer["moe"].router.groups = LossGroups(batch=dist.group.WORLD, sequence=dist.group.WORLD)
        truth = gradients(model, None)
        for kept in KEPT:
            found = gradients(model, kept)
            assert len(found) == len(truth) > 6
            errors = [relative_error(a, b) for a, b in zip(found, truth, strict=True)]
            gaps[f"etp {etp} {' '.join(kept)}"] = max(errors)
    return gaps


@pytest.mark.parametrize("replicate_experts", ["off", 0.0])
def test_what_a_policy_keeps_is_what_was_brought(replicate_experts: Any) -> None:
    for gaps in run_ranks(selective_on_rank, 2, replicate_experts):
        assert len(gaps) == 2 * len(KEPT)
        assert max(gaps.values()) < 1e-6, gaps


def everything(*_a: object, **_k: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_shared_experts_under_a_policy_that_keeps_everything(activation: str) -> None:
    torch.manual_seed(0)
    config = MoEConfig(
        dim=D, hidden=8, router=RouterConfig(num_experts=4, top_k=2), shared_hidden=6, shared_gate=True,
        activation=activation,
    )  # fmt: skip
    layer, x = config.build(), torch.randn(2, 3, D, requires_grad=True)
    selective = partial(create_selective_checkpoint_contexts, everything)
    kept = {"use_reentrant": False, "context_fn": partial(replay_in_recompute, selective)}
    found = [
        [y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]
        for y in (layer(x).y, checkpoint(lambda x: layer(x).y, x, **kept))
    ]
    assert all(map(torch.equal, *found))


class InBlocks(nn.Module):
    """A layer in a block that is checkpointed, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        router = RouterConfig(num_experts=4, top_k=2, aux_loss=0.1)
        # Shared experts are what a backward comes to first: before FSDP2 has gathered the others.
        self.block = nn.Sequential(nn.LayerNorm(D), MoEConfig(dim=D, hidden=8, router=router, shared_hidden=6).build())

    def forward(self, x: Tensor, mask: Tensor | None, kept: Sequence[str] | None) -> Tensor:
        def run(h: Tensor) -> Tensor:
            out = self.block[1](self.block[0](h), token_mask=mask)
            return h + out.y + out.losses["aux"]

        h = self.first(x)
        h = run(h) if kept is None else checkpoint(run, h, **selecting(kept))
        y: Tensor = self.last(h)
        return y


def sharded_on_rank() -> dict[str, float]:
    """In units of FSDP2, with the experts on one rank each or on two."""
    gaps = {}
    for replicas, masked in itertools.product((1, 2), (False, True)):
        torch.manual_seed(5)
        model = InBlocks()
        mesh = init_device_mesh("cpu", (replicas, 2 // replicas), mesh_dim_names=("edp", "ep"))
        parallelize(model, mesh["ep"], {"block.1": ExpertParallel()})
        fully_shard_moe(model, init_device_mesh("cpu", (2,)), mesh["edp"])
        torch.manual_seed(7 + dist.get_rank())
        x, found = torch.randn(2, 3, D), []
        mask = torch.rand(2, 3) < 0.7 if masked else None
        for kept in (None, ["mm", "addmm"]):
            model.zero_grad()
            model(x, mask, kept).square().sum().backward()
            found.append([p.grad.to_local().clone() for p in model.parameters()])  # type: ignore[union-attr]
        errors = [relative_error(a, b) for a, b in zip(*found, strict=True) if b.numel()]
        gaps[f"{replicas} {masked}"] = max(errors)
    return gaps


def test_experts_in_a_unit_of_fsdp_of_their_own() -> None:
    for gaps in run_ranks(sharded_on_rank, 2):
        assert len(gaps) == 4
        assert max(gaps.values()) < 1e-6, gaps


def masked_on_rank() -> dict[str, float]:
    """One rank has a mask and the other has none, as of a batch that nothing was padded in."""
    gaps = {}
    for etp, combine, aux in itertools.product((False, True), COMBINE_MODES, (0.0, 0.1)):
        torch.manual_seed(3)
        router = RouterConfig(num_experts=4, top_k=2, aux_loss=aux)
        layer = MoEConfig(dim=D, hidden=8, router=router, combine=combine).build()
        model = spread(layer, "", etp)
        layer.router.groups = LossGroups(batch=dist.group.WORLD)
        x = torch.randn(2, 3, D, requires_grad=True)
        mask = torch.ones(2, 3, dtype=torch.bool) if dist.get_rank() else None

        def block(x: Tensor, model: nn.Module = model, mask: Tensor | None = mask) -> tuple[Tensor, Tensor]:
            out = model(x, token_mask=mask)
            return x + out.y, sum(out.losses.values(), x.new_zeros(()))

        def found(model: nn.Module = model, x: Tensor = x, **options: Any) -> list[Tensor]:
            y, losses = checkpoint(block, x, **options) if options else block(x)
            return list(torch.autograd.grad(y.square().sum() + losses, [x, *model.parameters()]))

        truth = found()
        for how in ({"use_reentrant": False}, selecting(["mm"])):
            errors = [relative_error(a, b) for a, b in zip(found(**how), truth, strict=True)]
            gaps[f"etp {etp} {combine} {aux} {len(how)}"] = max(errors)
    return gaps


def test_a_mask_on_one_rank_changes_no_order() -> None:
    for gaps in run_ranks(masked_on_rank, 2):
        assert len(gaps) == 16
        assert max(gaps.values()) < 1e-6, gaps


def compiled_on_rank() -> list[int]:
    graphs: list[int] = []

    def count(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(len(module.graph.nodes))
        return module.forward

    model: nn.Module = spread(build(torch.float32), "layers.*.moe", etp=False)
    x = torch.randn(2, 3, D)
    y, losses = torch.compile(model, backend=count, fullgraph=True)(x)
    (y.square().sum() + losses).backward()
    assert torch.equal(y, model(x)[0])
    return graphs


def test_a_layer_that_holds_all_experts_of_its_mesh_is_one_graph() -> None:
    assert len(run_ranks(compiled_on_rank, 1)[0]) == 1
