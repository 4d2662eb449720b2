"""Parameters that every rank holds whole beside a model that transformers sharded: peft's adapters, for one.

Legend: E experts, e experts of this rank, F expert hidden dim, r rank of an adapter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.function import Function
from torch.distributed.tensor import DTensor

from trimtab.autograd import forward_of, once_differentiable
from trimtab.errors import ConfigError
from trimtab.experts.weight import LoraFactors
from trimtab.parallel.meshes import SumGradients


class OwnExperts(Function):
    """[E, ...], which every rank of a group holds -> the [e, ...] of its own experts.

    Backward: all ranks' parts together, over the number of batches that the group has: what the mean of their losses
    has for a gradient, on every rank. Collective.
    """

    @staticmethod
    def forward(ctx: Any, whole: Tensor, experts: int, group: dist.ProcessGroup, batches: int) -> Tensor:
        ctx.group, ctx.batches = group, batches
        first = dist.get_rank(group) * experts
        return whole[first : first + experts]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None, None]:
        whole = d.new_empty(dist.get_world_size(ctx.group) * d.shape[0], *d.shape[1:])
        dist.all_gather_into_tensor(whole, d.contiguous(), group=ctx.group)
        return whole.div_(ctx.batches), None, None, None


def cut_over_tensor_ranks(lora: LoraFactors, weight: Tensor, transposed: bool) -> LoraFactors:
    """Cut LoRA that every rank holds whole to this rank's share of F, for a `weight` that `DistributedConfig(tp_size=)`
    cut over F: the rows of b, or the columns of a. Any other weight's LoRA is returned as it is.

    The other matrix and the rank's part of the result are what its base has: a share, or a part of a sum. So each
    rank's gradient is a part, and they are summed over the group: one all-reduce in the backward.

    transposed: whether the weight is [E, in, out].
    """
    names = (weight.device_mesh.mesh_dim_names or ()) if isinstance(weight, DTensor) else ()
    if not isinstance(weight, DTensor) or "tp" not in names:
        return lora
    tp, cut = weight.device_mesh["tp"], weight.placements[names.index("tp")]
    dim: int = getattr(cut, "dim", 0) % 3
    if dim == 0 or tp.size() == 1:
        return lora
    runs: int = getattr(cut, "split_factor", 1)  # gate and up lie one behind the other, and each is cut
    a, b = forward_of(SumGradients, tp.get_group(), lora.a, lora.b)
    of_inputs = dim == (1 if transposed else 2)

    def own(matrix: Tensor, dim: int) -> Tensor:
        mine = [run.chunk(tp.size(), dim)[tp.get_local_rank()] for run in matrix.chunk(runs, dim)]
        return torch.cat(mine, dim)

    return replace(lora, a=own(a, 2) if of_inputs else a, b=b if of_inputs else own(b, 1))


def average_replicated(model: nn.Module) -> None:
    """Average the gradients of trained parameters that nobody shards over the data-parallel ranks, as a backward ends.

    For a model loaded with `distributed_config=`, behind `get_peft_model`: transformers reduces what it sharded, and
    peft's adapters came later. An average that is taken twice stays itself, so gradients may accumulate. Call it on
    every rank; each backward must then reach a trained parameter on every rank.

    Raises ConfigError for a model that transformers did not distribute.
    """
    whole: Any = model
    inner = whole.get_base_model() if hasattr(model, "get_base_model") else model
    meshes = getattr(inner, "_mesh_manager", None)
    if meshes is None:
        raise ConfigError("average_replicated: the model was not loaded with distributed_config=")
    groups = [meshes.get_mesh(name).get_group() for name in ("dp_replicate", "fsdp")]
    params = [p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    _Averaged(params, [group for group in groups if group.size() > 1])


class _Averaged:
    def __init__(self, params: list[nn.Parameter], groups: list[dist.ProcessGroup]) -> None:
        self.params, self.groups, self.queued = params, groups, False
        for param in params:
            param.register_post_accumulate_grad_hook(self._reached)  # type: ignore[no-untyped-call]

    def _reached(self, _: Tensor) -> None:
        if not self.queued:
            self.queued = True
            Variable._execution_engine.queue_callback(self._reduce)

    @torch.no_grad()
    def _reduce(self) -> None:
        self.queued = False
        for param in self.params:
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            for group in self.groups:
                dist.all_reduce(grad, group=group)
                grad.div_(group.size())
            param.grad = grad
