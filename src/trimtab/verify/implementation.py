"""The interface of a layer under judgment: where its ranks stand, what a rank is given, what it gives back.

trimtab's own is imported when it is asked for, and so is one of `--impl MODULE:CLASS`.

Legend: B sequences, l positions that this rank is given, D model dim, K experts per token, E experts.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trimtab.errors import ConfigError
from trimtab.parallel.meshes import local_part
from trimtab.verify.patterns import Pattern
from trimtab.verify.topologies import Topology
from trimtab.verify.truth import LayerWeights, Sizes

OWN = "trimtab.verify.trimtab_impl:Impl"


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's device and the meshes of the topology. All ranks of the topology hold one each.

    dense: ("dp", "tp"), or ("outer", "shard", "tp") with data="hsdp". experts: ("edp", "etp", "ep").
    cp: those of the data-parallel ranks that have positions of the same sequences; None where none have.
    """

    topology: Topology
    rank: int
    device: torch.device
    dense: DeviceMesh
    experts: DeviceMesh
    cp: DeviceMesh | None = None


def make_place(topology: Topology, rank: int, device: torch.device) -> Place:
    """The meshes over ranks 0 .. topology.ranks - 1. Collective over all ranks of the world, members or not."""
    t = topology

    def mesh(**sizes: int) -> DeviceMesh:
        ranks = torch.arange(t.ranks).view(*sizes.values())
        return DeviceMesh(device.type, ranks, mesh_dim_names=tuple(sizes))

    if t.data == "hsdp":
        shard = 2 if t.dp % 2 == 0 else 1
        dense = mesh(outer=t.dp // shard, shard=shard, tp=t.tp)
    else:
        dense = mesh(dp=t.dp, tp=t.tp)
    experts = mesh(edp=t.edp, etp=t.etp, ep=t.ep)
    cp = mesh(outer=t.dp // t.cp, cp=t.cp, tp=t.tp)["cp"] if t.cp > 1 else None
    return Place(topology=t, rank=rank, device=device, dense=dense, experts=experts, cp=cp)


@dataclass(frozen=True, kw_only=True)
class Share:
    """This rank's part of its data-parallel rank's batch: its own positions, or all where the topology's tokens are so.

    x_BlD in the case's dtype; ids_BlK, mask_Bl and documents_Bl (the document of each token) where the case has them.
    """

    x_BlD: Tensor
    dy_BlD: Tensor
    ids_BlK: Tensor | None
    mask_Bl: Tensor | None
    documents_Bl: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one forward and backward.

    y, dx: as x. grads: whole (unsharded) gradients by name, "0.router", "0.up", "0.down", "1.router" …, or None
    where a parameter has none. loads: [E] tokens per expert of this rank's tokens, by layer, where it counts them.
    copied: where experts are copied, by layer: [P] experts sent to each rank of the expert group.
    slots: there, by layer: [P] slots that each of these ranks computes.
    updated: where an optimizer is judged, whole parameters by name, see `truth.updated`.
    """

    y: Tensor
    dx: Tensor
    grads: dict[str, Tensor | None]
    loads: list[Tensor] | None = None
    copied: list[Tensor] | None = None
    slots: list[Tensor] | None = None
    updated: dict[str, Tensor] = field(default_factory=dict)


class Subject(Protocol):
    """A model of `sizes.layers` MoE layers: h = h + moe(h) between them, y = moe(h) at the end.

    Where its parameters are not the weights, `expected(grads)` makes the gradients that it must give of the true ones.
    """

    def step(self, share: Share) -> Outcome:
        """Forward, backward from dy, and the gradients of the mean loss over the data-parallel ranks. Collective."""
        ...


class Implementation(Protocol):
    """Builds subjects. `refusal`: the class of the error that every rank raises for input that can't be used."""

    name: str
    refusal: type[Exception]

    def lacks(self, topology: Topology, pattern: Pattern) -> str | None:
        """The reason why it can't be asked for this, or None."""
        ...

    def build(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights]) -> Subject:
        """A subject with these weights. Collective over the ranks of the topology."""
        ...


def home_of(name: str) -> tuple[str, str]:
    """(module, class) of "trimtab" or of "MODULE:CLASS". Raises ConfigError for any other name."""
    module, colon, attribute = (OWN if name == "trimtab" else name).partition(":")
    if not colon:
        raise ConfigError(
            f"--impl {name}: must be trimtab, or MODULE:CLASS of an implementation; of other libraries the repository "
            "has them: PYTHONPATH=tests trimtab verify --impl peers.transformers_impl:Impl"
        )
    return module, attribute


def get_implementation(name: str) -> Implementation:
    """An instance of trimtab's implementation, or of the class that "MODULE:CLASS" names.

    Raises:
        ConfigError: no such name, module or class; a module that cannot be imported here; says why.
    """
    module, attribute = home_of(name)
    try:
        made: Implementation = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"--impl {name} can't be judged here: {error}") from error
    if absent := [part for part in ("name", "refusal", "lacks", "build") if not hasattr(made, part)]:
        raise ConfigError(f"--impl {name}: has no {', no '.join(absent)}, which {__name__}.Implementation describes")
    return made


def averaged(grad: Tensor, place: Place, of_experts: bool) -> Tensor:
    """A gradient of this rank's own loss, or its part of a DTensor, made the mean loss's, in place. Collective."""
    local = local_part(grad)
    mesh = place.experts["edp"] if of_experts else place.dense["dp"]
    dist.all_reduce(local, group=mesh.get_group())
    local /= place.topology.dp
    return grad


def gradients_of(
    params: Iterable[tuple[str, nn.Parameter]], place: Place, short: Mapping[str, str]
) -> dict[str, Tensor | None]:
    """Whole gradients of "layers.<i>.<name>" as "<i>.<short[name]>"; without data parallelism they are averaged.
    Collective."""
    found: dict[str, Tensor | None] = {}
    for name, param in params:
        grad = param.grad
        if grad is not None and place.topology.data == "none":
            grad = averaged(grad, place, ".experts." in name)
        found[short_name(name, short)] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def short_name(name: str, short: Mapping[str, str]) -> str:
    """ "<i>.<short[name]>" of "layers.<i>.<name>"."""
    layer, part = name.removeprefix("module.").removeprefix("layers.").split(".", 1)
    return f"{layer}.{short[part]}"


def over_all_ranks(loads_E: Tensor, place: Place) -> Tensor:
    """Loads summed over all ranks of the topology, in place: each routes tokens of its own. Collective."""
    for name in ("edp", "etp", "ep"):
        dist.all_reduce(loads_E, group=place.experts[name].get_group())
    return loads_E
