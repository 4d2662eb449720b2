"""Meshes of a topology on the ranks of a run, and what each rank is given of a problem."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from trimtab.verify.adapters.base import Place, Share
from trimtab.verify.problem import Batch, Problem
from trimtab.verify.topologies import Topology


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


def positions_of(place: Place, batch: Batch) -> slice:
    """The positions that this rank is given: all of them, or its shard."""
    if place.topology.tokens != "sharded":
        return slice(0, batch.cuts[-1])
    t = place.rank % place.topology.tp
    return slice(batch.cuts[t], batch.cuts[t + 1])


def share_of(place: Place, problem: Problem) -> tuple[Share, Batch, slice]:
    """What this rank is given, in memory of its own, the batch that it is cut from, and where."""
    batch = problem.batches[place.rank // place.topology.tp]
    here = positions_of(place, batch)
    dtype, device = problem.sizes.dtype, place.device
    share = Share(
        x_BlD=batch.x_BLD[:, here].to(device, dtype, copy=True).contiguous(),
        dy_BlD=batch.dy_BLD[:, here].to(device, dtype, copy=True).contiguous(),
        ids_BlK=batch.ids_BLK[:, here].to(device, copy=True).contiguous() if batch.replayed else None,
        mask_Bl=None if batch.mask_BL is None else batch.mask_BL[:, here].to(device, copy=True).contiguous(),
    )
    return share, batch, here
