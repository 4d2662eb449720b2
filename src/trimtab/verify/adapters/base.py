"""Where a rank stands, what it is given, and what an implementation must offer to be judged.

Legend: B sequences, l positions that this rank is given, D model dim, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trimtab.verify.patterns import Pattern
from trimtab.verify.problem import Batch, LayerWeights, Problem, Sizes
from trimtab.verify.topologies import Topology


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank stands: device, and the meshes of the topology. All ranks of the topology hold one each.

    dense: ("dp", "tp"), or ("replicate", "shard", "tp") with data="hsdp". experts: ("edp", "etp", "ep").
    cp: those of the data-parallel ranks that have positions of the same sequences; None where none have.
    """

    topology: Topology
    rank: int
    device: torch.device
    dense: DeviceMesh
    experts: DeviceMesh
    cp: DeviceMesh | None = None


@dataclass(frozen=True, kw_only=True)
class Share:
    """What this rank is given of its data-parallel rank's batch: all positions ("replicated"), or its own.

    x_BlD in the case's dtype; ids_BlK and mask_Bl where the case has them.
    """

    x_BlD: Tensor
    dy_BlD: Tensor
    ids_BlK: Tensor | None
    mask_Bl: Tensor | None


def make_place(topology: Topology, rank: int, device: torch.device) -> Place:
    """The meshes over ranks 0 .. topology.ranks - 1. Collective over all ranks of the world, members or not."""
    t, ranks = topology, torch.arange(topology.ranks)
    names: tuple[str, ...]
    if t.data == "hsdp":
        shard = 2 if t.dp % 2 == 0 else 1
        dense, names = ranks.view(t.dp // shard, shard, t.tp), ("replicate", "shard", "tp")
    else:
        dense, names = ranks.view(t.dp, t.tp), ("dp", "tp")
    experts = ranks.view(t.edp, t.etp, t.ep)
    cp = None
    if t.cp > 1:
        cp = DeviceMesh(device.type, ranks.view(t.dp // t.cp, t.cp, t.tp), mesh_dim_names=("outer", "cp", "tp"))["cp"]
    return Place(
        topology=t,
        rank=rank,
        device=device,
        dense=DeviceMesh(device.type, dense, mesh_dim_names=names),
        experts=DeviceMesh(device.type, experts, mesh_dim_names=("edp", "etp", "ep")),
        cp=cp,
    )


def share_of(place: Place, problem: Problem) -> tuple[Share, Batch, slice]:
    """What this rank is given, in memory of its own, the batch that it is cut from, and where."""
    batch = problem.batches[place.rank // place.topology.tp]
    here = slice(0, batch.cuts[-1])
    if place.topology.tokens == "sharded":
        t = place.rank % place.topology.tp
        here = slice(batch.cuts[t], batch.cuts[t + 1])
    dtype, device = problem.sizes.dtype, place.device
    share = Share(
        x_BlD=batch.x_BLD[:, here].to(device, dtype, copy=True).contiguous(),
        dy_BlD=batch.dy_BLD[:, here].to(device, dtype, copy=True).contiguous(),
        ids_BlK=batch.ids_BLK[:, here].to(device, copy=True).contiguous() if batch.replayed else None,
        mask_Bl=None if batch.mask_BL is None else batch.mask_BL[:, here].to(device, copy=True).contiguous(),
    )
    return share, batch, here


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one forward and backward.

    y, dx: as x. grads: whole (unsharded) gradients by name, "0.router", "0.up", "0.down", "1.router" …, or None
    where a parameter has none. loads: [E] tokens per expert of this rank's tokens, by layer, where it counts them.
    """

    y: Tensor
    dx: Tensor
    grads: dict[str, Tensor | None]
    loads: list[Tensor] | None


class Subject(Protocol):
    """A model of `sizes.layers` MoE layers: h = h + moe(h) between them, y = moe(h) at the end."""

    def step(self, share: Share) -> Outcome:
        """Forward, backward from dy, and the gradients of the mean loss over the data-parallel ranks. Collective."""
        ...


class Implementation(Protocol):
    """A way to build subjects. `refusal`: what it raises, on every rank, for input that can't be used."""

    name: str
    refusal: type[Exception]

    def lacks(self, topology: Topology, pattern: Pattern) -> str | None:
        """Why it can't be asked for this, or None."""
        ...

    def build(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights]) -> Subject:
        """A subject with these weights. Collective over the ranks of the topology."""
        ...
