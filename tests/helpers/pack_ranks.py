"""Packs over ranks, whose sequences are cut or not, against the same documents one by one in one process.

Legend: B rows, L positions, D model dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from helpers.comparing import full_value, relative_error
from helpers.layout_case import mesh, uneven
from trimtab.layout import shard_cuts
from trimtab.moe import MoE, MoEConfig
from trimtab.parallel.expert_parallel import ExpertParallel, parallelize
from trimtab.parallel.moe import join_data_parallel
from trimtab.routing.balance import set_totals
from trimtab.routing.config import RouterConfig
from trimtab.routing.recompute import replay_in_recompute

D, E, K = 8, 4, 2
PACKS: dict[str, list[list[list[int]]]] = {
    "uneven": [[[5, 1, 3], [2, 7]], [[4, 4, 1], [9]]], "empty": [[[5, 1, 3], [2, 7]], [[], []]],
    "ragged": [[[6, 2]], [[1, 1, 1, 10], [13], [5, 8]]], "all empty": [[[]], [[]]],
}  # fmt: skip
"""By data-parallel group, by row, the documents' lengths."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Ranks as dense [dp, cp, tp]. order: of the positions that a rank of cp has: "zigzag", "uneven", or all with the
    "last". masked: share of padding. rerun: each forward is run again in the backward."""

    ep: int = 1
    cp: int = 1
    tp: int = 1
    tokens: str = "own"
    order: str = "zigzag"
    packs: str = "uneven"
    masked: float = 0.3
    counted: bool = True
    rerun: bool = False


def build() -> MoE:
    torch.manual_seed(5)
    router = RouterConfig(num_experts=E, top_k=K, sequence_aux_loss=0.7, global_aux_loss=0.3, z_loss=0.1, bias=True)
    return MoEConfig(dim=D, hidden=8, router=router, shared_hidden=6, dtype=torch.float64).build()


@dataclass(frozen=True, kw_only=True)
class Pack:
    """x, dy [B, L, D], mask and ids [B, L] of one data-parallel group; lengths by row."""

    x: Tensor
    dy: Tensor
    mask: Tensor
    ids: Tensor
    lengths: list[list[int]]


def packs_of(cut: Cut, number: int) -> list[Pack]:
    g = torch.Generator().manual_seed(3)
    found = []
    for lengths in (PACKS[cut.packs] * number)[:number]:
        shape = len(lengths), sum(lengths[0])
        x, dy = (torch.randn(*shape, D, generator=g, dtype=torch.float64) for _ in range(2))
        mask = torch.rand(shape, generator=g) >= cut.masked
        ids = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row).long()) for row in lengths])
        found.append(Pack(x=x.masked_fill(~mask[..., None], torch.nan), dy=dy, mask=mask, ids=ids, lengths=lengths))
    return found


def documents_apart(packs: list[Pack], totals: tuple[int, dict[str, Tensor]], divisor: int) -> dict[str, Any]:
    """One process, one forward for each document: losses, loads, gradients of the mean task loss plus the losses."""
    moe = build()
    set_totals(moe, *totals)
    losses: dict[str, Tensor] = {}
    ys, dxs = [], []
    for pack in packs:
        x = pack.x.clone().requires_grad_()
        y = torch.zeros_like(pack.x)
        for row, lengths in enumerate(pack.lengths):
            for part in torch.arange(x.shape[1]).split(lengths) if lengths else ():
                out = moe(x[row : row + 1, part], token_mask=pack.mask[row : row + 1, part])
                y[row, part] = out.y[0].detach()
                task = (out.y * pack.dy[row : row + 1, part]).sum()
                (task / divisor + sum(out.losses.values())).backward()
                for name, loss in out.losses.items():
                    losses[name] = losses.get(name, 0) + loss.detach()
        ys.append(y)
        dxs.append(torch.zeros_like(pack.x) if x.grad is None else x.grad * divisor)
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in moe.named_parameters()}
    return {"y": ys, "dx": dxs, "losses": losses, "loads": moe.router.take_loads(), "grads": grads}


def held_by(cut: Cut, length: int, c: int, t: int) -> list[int]:
    """The positions that a rank is given."""
    half = shard_cuts(length, 2 * cut.cp)
    held = [p for i in (c, 2 * cut.cp - 1 - c) for p in range(half[i], half[i + 1])]
    if cut.cp == 1:
        held = list(range(length))
    elif cut.order != "zigzag":
        cuts = uneven(length, cut.cp) if cut.order == "uneven" else (0, *[0] * (cut.cp - 1), length)
        held = list(range(cuts[c], cuts[c + 1]))
    if cut.tokens == "sharded":
        cuts = uneven(len(held), cut.tp)
        held = held[cuts[t] : cuts[t + 1]]
    return held


def run_cuts(cuts: list[Cut]) -> dict[Cut, dict[str, float]]:
    return {cut: run_cut(cut) for cut in cuts}


def run_cut(cut: Cut) -> dict[str, float]:
    """Errors of everything, by name."""
    world = dist.get_world_size()
    dp, edp = world // (cut.cp * cut.tp), world // cut.ep
    dense, flat = mesh(dp=dp, cp=cut.cp, tp=cut.tp), mesh(data=dp * cut.cp, tp=cut.tp)["data"]
    experts = mesh(edp=edp, ep=cut.ep)
    d, c, t = dense.get_coordinate() or (0, 0, 0)
    packs = packs_of(cut, dp)
    alone = build()
    every = [alone.router(p.x.flatten(0, 1), token_mask_T=p.mask.flatten()).loads_E for p in packs]
    totals = sum(int(pack.mask.sum()) for pack in packs), {"router": torch.stack(every).sum(0)}
    true = documents_apart(packs, totals, dp * cut.cp)

    moe = build()
    style = ExpertParallel(
        tokens=cut.tokens, tp_mesh=dense["tp"] if cut.tokens != "own" else None,  # type: ignore[arg-type]
        cp_mesh=dense["cp"] if cut.cp > 1 else None,
    )  # fmt: skip
    parallelize(moe, experts["ep"], {"": style})
    join_data_parallel(moe, flat, experts["edp"])
    set_totals(moe, *totals)
    own, held = packs[d], held_by(cut, packs[d].x.shape[1], c, t)
    x = own.x[:, held].requires_grad_()
    more: dict[str, Any] = {"token_mask": own.mask[:, held], "sequence_ids": own.ids[:, held].int()}
    if cut.counted:  # the same on every rank, and more than there are
        more["num_sequences"] = 5

    def layer(x: Tensor) -> tuple[Tensor, ...]:
        out = moe(x, **more)
        return out.y, *out.losses.values()

    y, *losses = checkpoint(layer, x, use_reentrant=False, context_fn=replay_in_recompute) if cut.rerun else layer(x)
    torch.autograd.backward([y, *losses], [own.dy[:, held], *map(torch.ones_like, losses)])
    assert x.grad is not None
    errors = {"y": relative_error(y, true["y"][d][:, held]), "dx": relative_error(x.grad, true["dx"][d][:, held])}
    for name, loss in zip(("sequence_aux", "global_aux", "z"), losses, strict=True):
        errors[name] = relative_error(loss, torch.as_tensor(true["losses"].get(name, 0.0)))
    loads = moe.router.take_loads()
    dist.all_reduce(loads)
    errors["loads"] = relative_error(loads, true["loads"])
    for name, param in moe.named_parameters():
        grad = param.grad
        assert grad is not None, name
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        dist.all_reduce(local, group=(experts["edp"] if name.startswith("experts.") else flat).get_group())
        local /= dp * cut.cp
        errors[f"d {name}"] = relative_error(full_value(grad), true["grads"][name])
    return errors
