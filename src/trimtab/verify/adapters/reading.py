"""Reading results that lie spread over the ranks of a topology. Collective: every rank of it calls.

Legend: E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trimtab.parallel.meshes import local_part
from trimtab.verify.adapters.base import Place


def averaged(grad: Tensor, place: Place, of_experts: bool) -> Tensor:
    """A gradient of this rank's own loss, or its part of a DTensor, reduced to the mean loss's, in place."""
    local = local_part(grad)
    mesh = place.experts["edp"] if of_experts else place.dense["dp"]
    dist.all_reduce(local, group=mesh.get_group())
    local /= place.topology.dp
    return grad


def gradients_of(
    params: Iterable[tuple[str, nn.Parameter]], place: Place, short: Mapping[str, str]
) -> dict[str, Tensor | None]:
    """Whole gradients of "layers.<i>.<name>" as "<i>.<short[name]>"; without data parallelism they are averaged."""
    found: dict[str, Tensor | None] = {}
    for name, param in params:
        grad = param.grad
        if grad is not None and place.topology.data == "none":
            grad = averaged(grad, place, ".experts." in name)
        layer, part = name.removeprefix("module.").removeprefix("layers.").split(".", 1)
        found[f"{layer}.{short[part]}"] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def residual(layers: Iterable[nn.Module], h: Tensor, run: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
    """The layers in turn, h = h + layer(h) between them; the last one's own output."""
    y = h
    for i, layer in enumerate(layers):
        h = h + y if i else h
        y = run(layer, h)
    return y


def over_all_ranks(loads_E: Tensor, place: Place) -> Tensor:
    """Loads summed over all ranks of the topology, in place: each routes tokens of its own."""
    for name in ("edp", "etp", "ep"):
        dist.all_reduce(loads_E, group=place.experts[name].get_group())
    return loads_E
