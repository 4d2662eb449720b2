"""A model with every kind of matrix, under the layouts that users spread models by, stepped with gradients that are cut
from one global draw: parameters and state then have the bits of one process.

Legend: E experts, F hidden dim, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from helpers.comparing import full_value
from trimtab.checkpoint import load, save
from trimtab.moe import MoEConfig
from trimtab.optim import KELLER, Layout, Muon
from trimtab.parallel.ddp import ddp
from trimtab.parallel.expert_parallel import ExpertParallel, parallelize
from trimtab.parallel.fsdp import fully_shard_moe
from trimtab.parallel.meshes import local_part
from trimtab.routing.config import RouterConfig

D, F = 128, 32
"""So that shares of vectors are whole vectors of the processor: torch's fused AdamW rounds the rest otherwise."""
Kept = dict[str, Tensor]
Matrices = list[Tensor]
"""Of each matrix where its entries are in the parameter as one row, [rows, columns], outputs by inputs."""
OPTIONS: dict[str, Any] = {
    "lr": 0.05,
    "layouts": {"*.qkv.weight": Layout((192, 32, 32))},  # parts of other scales
}


class Block(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        router = RouterConfig(num_experts=experts, top_k=2)
        self.moe = MoEConfig(dim=D, hidden=F, router=router, bias=True, shared_hidden=32).build()
        self.qkv = nn.Linear(D, 256, bias=False)
        self.o_proj = nn.Linear(64, D)
        self.few = nn.Linear(D, 3, bias=False)  # ranks without a row
        self.odd = nn.Linear(D, 41, bias=False)
        self.norm = nn.LayerNorm(D)


class Model(nn.Module):
    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, D)
        self.layers = nn.ModuleList(Block(experts) for _ in range(3))
        self.lm_head = nn.Linear(D, 10, bias=False)


def ranks(*sizes: int, names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def by_trimtab(data: str, ep: int = 1, etp: int = 1) -> Callable[[nn.Module], nn.Module]:
    def spread(model: nn.Module) -> nn.Module:
        every = torch.arange(dist.get_world_size())
        experts = DeviceMesh("cpu", every.view(-1, etp, ep), mesh_dim_names=("edp", "etp", "ep"))
        style = ExpertParallel(etp="etp" if etp > 1 else None)
        parallelize(model, experts["etp", "ep"] if etp > 1 else experts["ep"], {"layers.*.moe": style})
        if data == "ddp":
            return ddp(model, DeviceMesh("cpu", every), experts["edp"])
        dense = DeviceMesh("cpu", every)
        if data == "hsdp":
            dense = DeviceMesh("cpu", every.view(2, -1), mesh_dim_names=("replicate", "shard"))
        return fully_shard_moe(model, dense, experts["edp"], blocks=["layers.*.moe"])

    return spread


def by_fsdp(dim: int, *sizes: int) -> Callable[[nn.Module], nn.Module]:
    """torch's own, cut in `dim` where a parameter has it and it divides."""

    def spread(model: nn.Module) -> nn.Module:
        mesh = ranks(*sizes, names=("replicate", "shard")[-len(sizes) :])

        def place(param: nn.Parameter) -> Shard | None:
            return Shard(dim) if param.ndim > dim and (dim == 0 or param.shape[dim] % sizes[-1] == 0) else None

        return fully_shard(model, mesh=mesh, shard_placement_fn=place)

    return spread


def by_tp(fsdp: int = 1) -> Callable[[nn.Module], nn.Module]:
    def spread(model: nn.Module) -> nn.Module:
        mesh = ranks(fsdp, dist.get_world_size() // fsdp, names=("fsdp", "tp"))
        for block in model.layers:  # type: ignore[union-attr]
            plan = {"qkv": ColwiseParallel(), "o_proj": RowwiseParallel(), "odd": ColwiseParallel()}
            if fsdp > 1:
                del plan["odd"]  # FSDP2 over TP: even shares
            parallelize_module(block, mesh["tp"], plan)  # type: ignore[arg-type]
        return fully_shard(model, mesh=mesh["fsdp"]) if fsdp > 1 else model

    return spread


LAYOUTS: dict[int, dict[str, Callable[[nn.Module], nn.Module]]] = {
    2: {
        "ep 2": by_trimtab("ddp", ep=2), "etp 2": by_trimtab("fsdp", etp=2), "tp 2": by_tp(),
        "fsdp, dim 0": by_fsdp(0, 2), "fsdp, dim 1": by_fsdp(1, 2), "fsdp, dim 2": by_fsdp(2, 2),
        "fsdp, dim 3": by_fsdp(3, 2), "ddp": by_trimtab("ddp"),
    },
    4: {
        "ep 4": by_trimtab("fsdp", ep=4), "ep 2 x fsdp 2": by_trimtab("fsdp", ep=2),
        "ep 2 x etp 2": by_trimtab("fsdp", ep=2, etp=2), "etp 2 x fsdp 2": by_trimtab("fsdp", etp=2),
        "hsdp": by_fsdp(0, 2, 2), "hsdp, dim 2": by_fsdp(2, 2, 2), "ep 2, hsdp": by_trimtab("hsdp", ep=2),
        "fsdp 4, dim 0": by_fsdp(0, 4), "fsdp 4, dim 1": by_fsdp(1, 4), "tp 2 x fsdp 2": by_tp(2),
    },
}  # fmt: skip


class Run:
    """A model under a layout, with its optimizer."""

    def __init__(
        self, spread: Callable[[nn.Module], nn.Module] | None, dtype: torch.dtype, *, experts: int = 4, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = Model(experts).to(dtype)
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.randn(p.shape))
        self.shapes = {name: p.shape for name, p in self.model.named_parameters()}
        if spread is not None:
            spread(self.model)
        self.optimizer = Muon(self.model, **OPTIONS | options)
        self.collectives = 0

    def step(self, number: int) -> None:
        """By the gradients of that number."""
        draw = torch.Generator().manual_seed(number)
        for name, p in self.model.named_parameters():
            grad = torch.randn(self.shapes[name], generator=draw).to(p.dtype)
            p.grad = placed_as(p, grad)
        with CommDebugMode() as told:
            self.optimizer.step()
        self.collectives = told.get_total_counts()

    def whole(self) -> Kept:
        found = {name: full_value(p.detach()).clone() for name, p in self.model.named_parameters()}
        names = {p: name for name, p in self.model.named_parameters()}
        for p, state in self.optimizer.state.items():
            found |= {f"{names[p]} {key}": _bits(full_value(t).clone()) for key, t in state.items()}
        return found

    @torch.no_grad()
    def poison(self) -> None:
        for p in self.model.parameters():
            local_part(p).fill_(torch.nan)


def _bits(t: Tensor) -> Tensor:
    return t.view(torch.int16) if t.dtype == torch.bfloat16 else t


def placed_as(p: Tensor, whole: Tensor) -> Tensor:
    if not isinstance(p, DTensor):
        return whole
    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)


def stepped(dtype: torch.dtype, numbers: tuple[int, ...] = (1, 2, 3), **options: Any) -> Kept:
    """What one process has after these steps."""
    run = Run(None, dtype, **options)
    for number in numbers:
        run.step(number)
    return run.whole()


def differing(one: Kept, two: Kept) -> list[str]:
    assert one.keys() == two.keys(), one.keys() ^ two.keys()
    return [name for name in one if not torch.equal(one[name], two[name])]


def under_layouts(names: tuple[str, ...], dtype: torch.dtype, options: dict[str, Any]) -> dict[str, tuple[Any, int]]:
    """By layout: what differs from one process after three steps, and the collectives of the last."""
    true, found = stepped(dtype, **options), {}
    for name in names:
        run = Run(LAYOUTS[dist.get_world_size()][name], dtype, **options)
        for number in (1, 2, 3):
            run.step(number)
        found[name] = (differing(run.whole(), true), run.collectives)
    return found


def resumed(pairs: tuple[tuple[str, str], ...], folder: Path, dtype: torch.dtype, options: dict[str, Any]) -> list[str]:
    """What differs from one process after three steps, the last under another layout than the two before: through
    `trimtab.checkpoint`, and through torch's helpers."""
    true, world = stepped(dtype, **options), dist.get_world_size()
    wrong = []
    for before, after in pairs:
        first = Run(LAYOUTS[world][before], dtype, **options)
        first.step(1)
        first.step(2)
        saved = save(folder / f"{before} {after}", first.model, first.optimizer, step=2)
        state = {"optim": get_optimizer_state_dict(first.model, first.optimizer)}
        dcp_save(state, checkpoint_id=folder / f"dcp {before} {after}")
        for helpers in (False, True):
            run = Run(LAYOUTS[world][after], dtype, **options)
            run.poison()
            load(saved, run.model, None if helpers else run.optimizer)
            if helpers:
                state = {"optim": get_optimizer_state_dict(run.model, run.optimizer)}
                dcp_load(state, checkpoint_id=folder / f"dcp {before} {after}")
                set_optimizer_state_dict(run.model, run.optimizer, state["optim"])
            run.step(3)
            wrong += [f"{before} -> {after}, {helpers=}: {name}" for name in differing(run.whole(), true)]
    return wrong


def check_dealt(name: str) -> None:
    """A layout has the bits of one process."""
    wrong, _ = under_layouts((name,), torch.float32, {})[name]
    assert not wrong, wrong


def newton_schulz(x: Tensor) -> Tensor:
    """By hand, of one matrix, in float64."""
    x = x.double() / x.double().norm()
    for a, b, c in KELLER:
        g = x @ x.T
        x = a * x + (b * g + c * g @ g) @ x
    return x


def worst_error(
    model: Any, truth: dict[str, Matrices], scale: str = "match_rms_adamw", steps: int = 2, **options: Any
) -> float:
    """Of steps' updates against the truth, relative, of the worst matrix. What is not in the truth is AdamW's. Of
    a model that is laid out over ranks by rank 0; the others say 0."""
    optimizer = Muon(model, lr=1.0, weight_decay=0.0, adjust_lr_fn=scale, **options)  # type: ignore[arg-type]
    params = dict(model.named_parameters())
    muons = {id(p) for group in optimizer.param_groups if group["rule"] == "muon" for p in group["params"]}
    assert {name for name, p in params.items() if id(p) in muons} == set(truth)
    draw, worst, momentum = torch.Generator().manual_seed(1), 0.0, dict.fromkeys(truth, torch.zeros(()))
    for _ in range(steps):
        before = {name: full_value(params[name].detach()).clone() for name in truth}
        grads = {name: torch.randn(param.shape, generator=draw, dtype=torch.float64) for name, param in params.items()}
        for name, param in params.items():
            param.grad = placed_as(param, grads[name].to(param.dtype))
        optimizer.step()
        for name, matrices in truth.items():
            grad = grads[name].to(params[name].dtype).double()
            momentum[name] = momentum[name] * 0.95 + 0.05 * grad
            update = (0.05 * grad + 0.95 * momentum[name]).flatten()
            moved = (before[name].double() - full_value(params[name].detach()).double()).flatten()
            assert sorted(torch.cat([w.flatten() for w in matrices]).tolist()) == list(range(moved.numel())), name
            for where in matrices if not dist.is_initialized() or dist.get_rank() == 0 else ():
                rows, columns = where.shape
                factor = (
                    0.2 * max(rows, columns) ** 0.5 if scale == "match_rms_adamw" else max(1, rows / columns) ** 0.5
                )
                right = factor * newton_schulz(update[where])
                worst = max(worst, float((moved[where] - right).norm() / right.norm()))
    return worst


def small(model: Any, dtype: torch.dtype) -> Any:
    """All parameters in the dtype, and so small that no rounding of theirs hides an update."""
    with torch.no_grad():
        for param in model.to(dtype).parameters():
            param.mul_(1e-3)
    return model
