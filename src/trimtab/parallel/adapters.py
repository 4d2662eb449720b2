"""Adapters of experts that are spread over ranks: DTensors of global shape, and gradients that are an expert's.

    mesh dim    gate_up_b [E, 2, F, r]    up_b [E, F, r]    down_a [E, r, F]    gate_up_a, up_a, down_b    shared pairs
    ep          Shard(0)                  Shard(0)          Shard(0)            Shard(0)                   Replicate()
    etp         Shard(2)                  Shard(1)          Shard(2)            Replicate()                as the others

Each adapter delivers what its base delivers: of a weight cut over F, that of gate and up is a share of F, and that of
down a part of a sum. What ranks of a dim hold alike meets the rows of each, so its gradient is summed over them, in
autograd: as every expert's, it is then the sum over all ranks' losses.

Legend: E experts, D model dim, F expert hidden dim, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from trimtab.autograd import once_differentiable
from trimtab.experts.lora import ExpertAdapter
from trimtab.parallel.meshes import ExpertMesh

SPLIT = {"gate_up_b": Shard(2), "up_b": Shard(1), "down_a": Shard(2)}


def cut_adapter(adapter: ExpertAdapter, place: ExpertMesh, src_data_rank: int | None) -> None:
    """Cut an adapter of all experts over `place`, in place."""
    for name, param in list(adapter.named_parameters()):
        experts = Replicate() if adapter.shared else Shard(0)
        cut = place.placements(experts, SPLIT.get(name, Replicate()))
        whole = distribute_tensor(param.detach(), place.mesh, cut, src_data_rank=src_data_rank)
        setattr(adapter, name, nn.Parameter(whole, requires_grad=param.requires_grad))


def summed_over_copies(
    adapters: Sequence[ExpertAdapter], parts: Sequence[dict[str, Tensor]], place: ExpertMesh
) -> None:  # fmt: skip
    """Sum the gradients of what ranks of a mesh dim hold alike: `parts` gets tensors that do. Every rank of the expert
    mesh must call with the same adapters, and run the backward: one all-reduce for each dim that has such."""
    for dim in range(place.mesh.ndim):
        alike = [
            (params, name)
            for adapter, params in zip(adapters, parts, strict=True)
            for name in params
            if (adapter.shared if dim == place.ep_dim else name not in SPLIT)
        ]
        if alike and place.mesh.size(dim) > 1:
            group = place.mesh.get_group(dim)
            made = SumGradients.apply(group, *(params[name] for params, name in alike))  # type: ignore[no-untyped-call]
            for (params, name), tensor in zip(alike, made, strict=True):
                params[name] = tensor


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
