"""Bugs with tokens that several ranks share: sequence shards, replicas, ranks without any.

Legend: B sequences, L positions, l positions of this rank, D model dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mutants.patching import Mutant, Patches
from trimtab.dispatch import sequence_shard
from trimtab.dispatch.all_gather import gather_uneven
from trimtab.moe import MoEOutput
from trimtab.parallel.moe import ParallelMoE


def _flat_offset(p: Patches) -> None:
    def take(x: Tensor, cuts: Sequence[int], rank: int) -> Tensor:
        tokens, lead = x.flatten(0, -2), x.shape[:-2]
        start, end = (cut * lead.numel() for cut in cuts[rank : rank + 2])
        return tokens[start:end].reshape(*lead, cuts[rank + 1] - cuts[rank], x.shape[-1]).contiguous()

    p.everywhere(sequence_shard.take_shard, take)


def _joined_by_rank(p: Patches) -> None:
    def join(x: Tensor, cuts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        lead = x.shape[:-2]
        tokens = [lead.numel() * (end - start) for start, end in pairwise(cuts)]
        gathered = gather_uneven(x.flatten(0, -2), max(tokens), group)
        return torch.cat([gathered[rank, :n] for rank, n in enumerate(tokens)]).view(*lead, cuts[-1], x.shape[-1])

    p.everywhere(sequence_shard.join_shards, join)


def _remainder(p: Patches) -> None:
    def even(length: int, ranks: int) -> tuple[int, ...]:
        return (*(rank * (length // ranks) for rank in range(ranks)), length // ranks * ranks)

    p.put(sequence_shard, "shard_cuts", even)


def _replicas_summed(p: Patches) -> None:
    @p.around(sequence_shard._Moved, "backward")
    def backward(original: Any, ctx: Any, dy: Tensor) -> Any:
        _, group, joined = ctx.where
        summed = dy.clone()
        if joined:
            dist.all_reduce(summed, group=group)
        return original(ctx, summed)


def _padded_by_repeats(p: Patches) -> None:
    @p.around(ParallelMoE, "forward")
    def forward(
        run: Any, self: ParallelMoE, x: Tensor, *, token_mask: Tensor | None = None, ids: Tensor | None = None
    ) -> MoEOutput:
        short = 0
        if self.tp_group is not None and not self.shares:
            longest = torch.tensor(x.shape[1])
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.tp_group)
            short = int(longest) - x.shape[1] if x.shape[1] else 0

        def padded(t: Tensor) -> Tensor:
            return torch.cat((t, t[:, -1:].expand(-1, short, *t.shape[2:])), 1) if short else t

        mask = None if token_mask is None else padded(token_mask)
        out: MoEOutput = run(self, padded(x), token_mask=mask, ids=None if ids is None else padded(ids))
        if not short:
            return out
        repeats = out.y[:, x.shape[1] :].sum(1, keepdim=True)
        y = out.y[:, : x.shape[1]]
        return out._replace(y=y + repeats - repeats.detach())  # cut off, but not from the gradient


def _empty_rank_leaves(p: Patches) -> None:
    @p.around(ParallelMoE, "forward")
    def forward(run: Any, self: ParallelMoE, x: Tensor, **kwargs: Any) -> MoEOutput:
        if x.numel() == 0 and self.dispatcher.transport is not None:
            loads = torch.zeros(self.dispatcher.num_experts, dtype=torch.int64)
            return MoEOutput(y=x.clone(), losses={}, loads_E=loads, ids_TK=loads[:0, None])
        made: MoEOutput = run(self, x, **kwargs)
        return made


def _router_not_summed(p: Patches) -> None:
    p.put(ParallelMoE, "_places", lambda self: [])


MUTANTS = (
    Mutant(name="batch_1_offset", patch=_flat_offset, look="3r-ep3-tp3-replicated-fsdp/*",
           says="shards are cut at local + T_local * rank, which is right for one sequence only (torchtitan#3604)"),
    Mutant(name="joined_by_rank", patch=_joined_by_rank, look="3r-ep3-tp3-replicated-fsdp/*",
           says="shards are put together rank after rank instead of by position (torchtitan#3604)"),
    Mutant(name="remainder_lost", patch=_remainder, look="3r-ep3-tp3-replicated-fsdp/*",
           says="every rank takes L // ranks positions and the rest is nobody's (torchtitan#3577, #3619, #3622)"),
    Mutant(name="replicas_double_counted", patch=_replicas_summed, look="3r-ep3-tp3-replicated-fsdp/*",
           says="the output's gradient, which every rank holds, is summed over the ranks: gradients x TP"),
    Mutant(name="padded_by_repeats", patch=_padded_by_repeats, look="2r-ep2-tp2-sharded/u*/*",
           says="short shards are filled up with repeated tokens, and the gradient counts them"),
    Mutant(name="empty_rank_leaves", patch=_empty_rank_leaves, look="2r-ep2/*", hangs=True,
           says="a rank without tokens returns early and its peers wait in the exchange"),
    Mutant(name="router_not_summed", patch=_router_not_summed, look="2r-ep2-tp2-sharded/*",
           says="the router's gradient is not summed over tensor-parallel ranks (torchtitan#4054)"),
)  # fmt: skip
