"""Parameters that every rank of a group holds while each works on its own tokens: their gradients are sums.

Each rank's gradient of such a parameter (router, shared experts) is that of its tokens only. The sum is taken where
the parameter enters the layer, in autograd, so that it is issued by every rank in the same place of the backward,
whatever its tokens, before any hook of DDP or FSDP2 sees a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function

from trimtab.backward import once_differentiable


class _SumGradients(Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(param.view_as(param) for param in params)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dtype = torch.float32
        for grad in grads:
            dtype = torch.promote_types(dtype, grad.dtype)
        flat = torch.cat([grad.reshape(-1).to(dtype) for grad in grads])
        dist.all_reduce(flat, group=ctx.group)
        parts = torch.split(flat, [grad.numel() for grad in grads])
        return None, *(part.view(grad.shape).to(grad.dtype) for part, grad in zip(parts, grads, strict=True))


def sum_gradients(params: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """The same tensors; their gradients are summed over `group` in one all-reduce, in float32 at least.

    Every rank of the group must call, and run the backward, with the same parameters.
    """
    out: tuple[Tensor, ...] = _SumGradients.apply(group, *params)  # type: ignore[no-untyped-call]
    return out
