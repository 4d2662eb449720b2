"""transformers' expert parallelism, carried by trimtab: what `ep_implementation="trimtab"` builds.

    tokens of this rank -> share of its TP group -> dispatch -> experts -> combine -> all tokens of the TP group

Works in front of any experts implementation: received rows, their local ids (with the sentinel `num_experts` for
slots of other ranks) and their weights go in, weighted sums per row come out. With `experts_implementation=
"trimtab"` behind it the rows are sorted once, and the host's count of them is passed on.

Legend: T tokens of this rank, K experts per token, D model dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.expert_parallel import EPImplementation

from trimtab.dispatch.alltoall import AllToAll
from trimtab.dispatch.dispatcher import Combine, Dispatcher, Rows
from trimtab.dispatch.shard import shard, unshard
from trimtab.hf.experts import experts_forward
from trimtab.layout import SequenceLayout


class _SumGradients(Function):
    """Identity; the gradient is summed over the group. For what every rank holds and each uses on its own rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        summed = dy.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class TrimtabEP(EPImplementation):  # type: ignore[misc]
    """One experts module under expert parallelism.

    Args:
        experts: the experts module, its parameters already sharded over `ep_mesh`.
        ep_mesh: the expert group. tp_mesh: the ranks that hold the same tokens (size 1 without TP).
    """

    experts_name = "trimtab"
    combine: Combine = "sum"

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts: Any = experts
        self.ep_group = ep_mesh.get_group()
        self.tp_group = tp_mesh.get_group()
        self.dispatcher = Dispatcher(
            self.num_local_experts * ep_mesh.size(), AllToAll(self.ep_group), combine=self.combine
        )

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted expert outputs [T, D] for this rank's tokens. Every rank of the expert group must call."""
        tensors = (hidden_states, top_k_index, top_k_weights)
        tp_size = self.tp_mesh.size()
        layout = SequenceLayout.even(1, hidden_states.shape[0], tp_size)
        if tp_size > 1:
            tensors = tuple(shard(t, layout, self.tp_group) for t in tensors)  # type: ignore[assignment]
        rows = self.dispatcher.dispatch(*tensors)
        y = self.dispatcher.combine(self._run_experts(rows), rows)
        return unshard(y, layout, self.tp_group) if tp_size > 1 else y

    def _run_experts(self, rows: Rows) -> Tensor:
        if self.experts.config._experts_implementation == self.experts_name:
            return experts_forward(
                self.experts,
                rows.x,
                rows.ids,
                rows.weights,
                num_slots=rows.num_slots,
                shared_param=lambda p: _SumGradients.apply(p, self.ep_group),  # type: ignore[no-untyped-call]
            )
        sentinel = rows.ids.masked_fill(rows.ids < 0, self.num_local_experts).long()
        y: Tensor = self.experts_forward(rows.x, sentinel, rows.weights)
        return y
