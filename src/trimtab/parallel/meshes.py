"""The meshes that a layer is handed: where its experts are, who has which tokens, and whether they fit together.

    tp      ranks with positions of one batch, whose gradients are summed in the layer       (TP, sequence parallel)
    cp      ranks with positions of the same sequences, whose gradients are averaged         (context parallel)
    data    all ranks that gradients are averaged over, those of cp among them               (DP x CP)

A gradient of the losses is summed over tp and divided by the size of data, so each rank's is multiplied by that size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from trimtab.autograd import once_differentiable
from trimtab.errors import ConfigError
from trimtab.guard.guard import SharedWhenCopied
from trimtab.routing.losses import LossGroups


def groups_of(mesh: DeviceMesh | None) -> tuple[dist.ProcessGroup, ...]:
    """The groups of this rank along each dim of a mesh, those of one rank left out."""
    dims = () if mesh is None else range(mesh.ndim)
    return tuple(mesh.get_group(d) for d in dims if mesh is not None and mesh.size(d) > 1)


def ranks_of(mesh: DeviceMesh | None) -> set[int]:
    """The global ranks of a mesh."""
    return set() if mesh is None else set(mesh.mesh.flatten().tolist())


def check_meshes(dims: int = 0, /, **meshes: object) -> None:
    """Raises ConfigError: one of them is no mesh, not of so many dims, or its ranks do not ascend along each dim. torch
    sorts the ranks of a group: what is cut by place in the mesh would be looked for by rank."""
    for name, mesh in meshes.items():
        if not isinstance(mesh, DeviceMesh):
            raise ConfigError(f"{name}={mesh!r} is no DeviceMesh: make one, as init_device_mesh('cuda', (8,)) does")
        if dims and mesh.ndim != dims:
            raise ConfigError(f"{name}={mesh}: hand in a mesh of one dim")
        place = mesh.get_coordinate() or ()
        for dim in range(len(place)):
            line = mesh.mesh[tuple(slice(None) if d == dim else at for d, at in enumerate(place))].tolist()
            ranks = dist.get_process_group_ranks(mesh.get_group(dim))
            if line != ranks:
                raise ConfigError(
                    f"{name}: along dim {dim} of {mesh.mesh.tolist()} the ranks are {line}, but their group is "
                    f"{ranks}: torch sorts it, so let ranks ascend along each dim"
                )


@dataclass(frozen=True, kw_only=True)
class ExpertMesh(SharedWhenCopied):
    """The mesh of experts: a slice of one dim (ep), or of two with `etp` naming the one that splits F."""

    mesh: DeviceMesh
    etp: str | None = None

    def __post_init__(self) -> None:
        check_meshes(**{"expert mesh": self.mesh})
        names = self.mesh.mesh_dim_names or ()
        if self.mesh.ndim != (1 if self.etp is None else 2) or (self.etp is not None and self.etp not in names):
            raise ConfigError(
                f"expert mesh {names or self.mesh.ndim} with etp={self.etp!r}: hand in one dim (ep), or two "
                "with etp naming the one that splits F, such as mesh['etp', 'ep'] and etp='etp'"
            )

    @property
    def ep_dim(self) -> int:
        return 1 if self.etp is not None and (self.mesh.mesh_dim_names or ())[0] == self.etp else 0

    @property
    def ep_group(self) -> dist.ProcessGroup:
        return self.mesh.get_group(self.ep_dim)

    @property
    def etp_size(self) -> int:
        return self.mesh.size() // self.mesh.size(self.ep_dim)

    def placements(self, experts: Placement, etp: Placement) -> list[Placement]:
        """`experts` over ep, `etp` over the other dim if there is one."""
        return [experts if dim == self.ep_dim else etp for dim in range(self.mesh.ndim)]


@dataclass(frozen=True, kw_only=True)
class TokenMeshes(SharedWhenCopied):
    """tp, cp: one dim each. data: one or two dims, with cp's ranks among its own; None where none is known but cp."""

    tp: DeviceMesh | None = None
    cp: DeviceMesh | None = None
    data: DeviceMesh | None = None

    def loss_groups(self) -> LossGroups:
        """The groups that share the balance losses. None is made: sums are taken along one mesh dim after another."""
        data = groups_of(self.cp if self.data is None else self.data)
        return LossGroups(
            batch=(*groups_of(self.tp), *data),
            sequence=(*groups_of(self.tp), *groups_of(self.cp)),
            divisor=math.prod(dist.get_world_size(group) for group in data),
        )

    def check(self, experts: int, layer: str) -> None:
        """Check that gradients reduced over `data` are whole. experts: ranks that hold an expert, or a part of it.

        Raises:
            ConfigError: cp is not within data, tp is, or not every rank with tokens is among those of the experts.
        """
        tp, cp, data = map(ranks_of, (self.tp, self.cp, self.data))
        problems = []
        if not cp <= data:
            problems.append(f"ranks {sorted(cp)} of cp_mesh must be in it: gradients are averaged over DP x CP")
        if tp & data - {dist.get_rank()}:
            problems.append(f"ranks {sorted(tp)} of tp_mesh must not: the layer has summed their gradients")
        tokens = len(data) * max(len(tp), 1)
        if tokens != experts:
            problems.append(
                f"with tp_mesh it makes {tokens} ranks with tokens, but {experts} hold experts: "
                "an expert's gradient would not be the mean loss's"
            )
        if problems:
            raise ConfigError(f"dp_mesh has ranks {sorted(data)}; {'; '.join(problems)}", layer=layer)


def local_part(tensor: Tensor) -> Tensor:
    """A DTensor's local tensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class SumGradients(Function):
    """The same tensors; their gradients are summed over `group` in one all-reduce, in float32 at least. Every rank of
    the group must call, and run the backward, with the same parameters."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(param.view_as(param) for param in params)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
        flat = torch.cat([grad.reshape(-1).to(dtype) for grad in grads])
        dist.all_reduce(flat, group=ctx.group)
        parts = torch.split(flat, [grad.numel() for grad in grads])
        return None, *(part.view(grad.shape).to(grad.dtype) for part, grad in zip(parts, grads, strict=True))
