"""Balance losses and z-loss, equal to those of a single process however the tokens are cut. Times coefficients, over
N real tokens t with p[t] the scores as a distribution, f[e] the fraction of slots that picked e before any capacity:

    aux           E / N * sum over t of f . p[t]          f over this micro-batch, all ranks    (arXiv 2101.03961)
    sequence_aux  E / N * sum over t of f[s(t)] . p[t]    f over t's sequence s(t), of a pack too  (arXiv 2412.19437)
    global_aux    E / N * sum over t of f . p[t]          f over the optimizer step, all ranks  (arXiv 2501.11873)
    z             1 / N * sum over t of logsumexp(logits[t])^2                                  (arXiv 2202.08906)

Each rank's value is the global one; its gradient is P times that of its own tokens, P the size of `LossGroups.batch`,
so that averaging parameter gradients over these ranks, as DDP and FSDP do, gives the single process's.

Legend: T tokens of this rank, B rows, S sequences, E experts, K experts per token, N real tokens, P ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.guard.guard import SharedWhenCopied
from trimtab.routing.config import COEFFICIENTS, RouterConfig
from trimtab.routing.port import Routing
from trimtab.routing.scores import SCORES, count_ids
from trimtab.validation import holds_ids, is_whole, wide_ids

Groups = dist.ProcessGroup | tuple[dist.ProcessGroup, ...] | None
"""One group; several that cross, as the dims of a mesh do: the sums over one are summed over the next; or none."""


@dataclass(frozen=True, kw_only=True)
class LossGroups(SharedWhenCopied):
    """Who shares what. `trimtab.parallel` sets it from the meshes it is handed; a value set by hand stays.

    batch: the ranks that hold parts of the global batch, those of `sequence` among them; None if there are no others.
    sequence: the ranks that hold parts of the same sequences (TP, CP), each of all of them; None where they are whole.
    divisor: what gradients are divided by when they are reduced over `batch`, its size if not given. A sum over
        some of the ranks and a mean over the others needs the number of the others.
    """

    batch: Groups = None
    sequence: Groups = None
    divisor: int | None = None

    @property
    def gradient_scale(self) -> int:
        if self.divisor is not None:
            return self.divisor
        return math.prod([dist.get_world_size(group) for group in each_group(self.everyone)])

    @property
    def everyone(self) -> Groups:
        """All that hold parts of the global batch, as far as is known."""
        return self.sequence if self.batch is None else self.batch


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTotals:
    """What one micro-batch cannot know of its optimizer step. Without it N counts the tokens of a micro-batch, and the
    trainer averages; with it N is the step's, the trainer adds up, and micro-batches may differ in size.

    tokens: real tokens of the step, over all micro-batches and ranks; becomes a tensor in float64, so that a compiled
        graph serves any. On a GPU hand in one of the device, as `set_totals` does.
    counts_E: how many slots picked each expert in the step. Without it `global_aux` uses the counts of the step so
        far, as Megatron-LM does, which is exact in a step of one micro-batch only.
    """

    tokens: float | Tensor
    counts_E: Tensor | None = None

    def __post_init__(self) -> None:
        given = self.tokens
        whole = given if isinstance(given, Tensor) else torch.tensor(given, dtype=torch.float64, device="cpu")
        object.__setattr__(self, "tokens", whole.double())


def fraction(counts: Tensor) -> Tensor:
    """Counts [..., E] over their sum, in float64; zeros where nothing was counted."""
    return counts.double() / counts.sum(-1, keepdim=True).clamp(min=1)


def each_group(groups: Groups) -> tuple[dist.ProcessGroup, ...]:
    """All of them, in their order."""
    if groups is None:
        return ()
    return groups if isinstance(groups, tuple) else (groups,)


def all_sum(t: Tensor, groups: Groups) -> Tensor:
    """`t` summed over the ranks of all groups."""
    if groups is None:
        return t
    summed = t.clone()
    for group in each_group(groups):
        dist.all_reduce(summed, group=group)
    return summed


def take_sums(counts: Mapping[str, Tensor], groups: Groups) -> dict[str, Tensor]:
    """The counts, all of one dtype, summed over the ranks of all groups in one all-reduce; they begin anew at zero."""
    if not counts:
        return {}
    summed = all_sum(torch.cat([each.flatten() for each in counts.values()]), groups)
    parts = torch.split(summed, [each.numel() for each in counts.values()])
    taken = {name: part.view_as(each) for (name, each), part in zip(counts.items(), parts, strict=True)}
    for each in counts.values():
        each.zero_()
    return taken


def balance_losses(
    routing: Routing, *, config: RouterConfig, groups: LossGroups, totals: StepTotals | None,
    counts_before_E: Tensor | None,
) -> tuple[dict[str, Tensor], Tensor | None]:  # fmt: skip
    """(name -> scalar, counts of this micro-batch over all ranks [E] float64). One all-reduce of 2 E + 3 numbers over
    `groups.everyone`, with a sequence_aux_loss another of S E counts over `groups.sequence`, whatever a rank's tokens.

    counts_before_E: counts of the step's earlier micro-batches, for `global_aux_loss`.

    Without any coefficient there is nothing to compute, nothing to exchange, and the counts are None.
    """
    c, num_experts = config, config.num_experts
    if routing.basis is None or not any(getattr(c, name) for name in COEFFICIENTS):
        return {}, None
    logits, (_, chosen, chosen_E, scores, real_T, batch, _, ids_T, most) = routing.logits_TE, routing.basis
    dtype = logits.dtype
    if real_T is None:
        real_T = torch.ones_like(logits[:, 0], dtype=torch.bool)
    if not SCORES[c.score].distribution:
        scores = scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)
    p_TE = scores.masked_fill(~real_T[:, None], 0)
    p_E = p_TE.sum(0)
    z = _log_sum_exp(logits).square().masked_fill(~real_T, 0).sum()
    sequence = z.new_zeros(())
    if c.sequence_aux_loss:
        sequence_T, number = _sequences(chosen[:, 0], batch, ids_T, most)
        f_SE = num_experts * _sequence_fractions(chosen, sequence_T, number, num_experts, groups).to(dtype)
        if ids_T is None:
            sequence = (f_SE * p_TE.view(batch, chosen.shape[0] // max(batch, 1), num_experts).sum(1)).sum()
        else:
            sequence = (f_SE.index_select(0, sequence_T) * p_TE).sum()
    sums = (real_T.sum()[None], chosen_E, p_E, sequence[None], z[None])
    everyone = all_sum(torch.cat([part.detach().double() for part in sums]), groups.everyone)
    n, counts_E, sum_p_E, sum_sequence, sum_z = torch.split(everyone, [1, num_experts, num_experts, 1, 1])
    tokens = (n if totals is None else cast(Tensor, totals.tokens).to(n)).clamp(min=1)
    scale = groups.gradient_scale

    def joined(local: Tensor, everywhere: Tensor) -> Tensor:
        value = (everywhere / tokens).to(dtype).sum()  # of one element
        return value + (local - local.detach()) * (scale / tokens).to(dtype).sum()

    def balance(of_E: Tensor) -> Tensor:
        f = num_experts * fraction(of_E)
        return joined((f.to(dtype) * p_E).sum(), (f * sum_p_E).sum())

    found = {}
    if c.aux_loss:
        found["aux"] = balance(counts_E) * c.aux_loss
    if c.sequence_aux_loss:
        found["sequence_aux"] = joined(sequence, sum_sequence) * c.sequence_aux_loss
    if c.global_aux_loss:
        step_E = counts_E if counts_before_E is None else counts_E + counts_before_E
        if totals is not None and totals.counts_E is not None:
            step_E = totals.counts_E.double()
        found["global_aux"] = balance(step_E) * c.global_aux_loss
    if c.z_loss:
        found["z"] = joined(z, sum_z) * c.z_loss
    return found, counts_E


def _log_sum_exp(logits_TE: Tensor) -> Tensor:
    """[T]. torch's own asks whether there are any logits, which a graph for any number of tokens cannot answer."""
    top_T1 = logits_TE.detach().amax(-1, keepdim=True)
    return (logits_TE - top_T1).exp().sum(-1).log() + top_T1[:, 0]


def _sequences(like_T: Tensor, batch: int, ids_T: Tensor | None, most: int | None) -> tuple[Tensor, int]:
    """(the sequence that each token is in, S or more): a row; within it a run of one id, or an id 0..most - 1, which
    names the same sequence on every rank that has positions of the row."""
    row_T = torch.arange(like_T.shape[0], device=like_T.device) // max(like_T.shape[0] // max(batch, 1), 1)
    if ids_T is None:
        return row_T, batch
    if most is not None:
        return row_T * most + ids_T.clamp(0, most - 1), batch * most
    begins_T = torch.zeros_like(row_T)
    begins_T[1:] = (ids_T[1:] != ids_T[:-1]) | (row_T[1:] != row_T[:-1])
    return begins_T.cumsum(0), like_T.shape[0]


def _sequence_fractions(
    chosen_TK: Tensor, sequence_T: Tensor, number: int, num_experts: int, groups: LossGroups
) -> Tensor:
    known = (chosen_TK >= 0) & (chosen_TK < num_experts)
    ids = torch.where(known, chosen_TK + sequence_T[:, None] * num_experts, -1)
    counts = count_ids(ids, number * num_experts).view(number, num_experts)
    return fraction(all_sum(counts, groups.sequence))


def problems_of_packs(tokens: int, ids_T: Tensor | None, num_sequences: int | None, *, cut: bool) -> list[str]:
    """Each as half a sentence. cut: a sequence-wise loss is taken of sequences that lie across ranks."""
    problems = []
    if ids_T is not None and (tuple(ids_T.shape) != (tokens,) or not holds_ids(ids_T)):
        problems.append(f"sequence ids must be int [{tokens}], got {ids_T.dtype} {tuple(ids_T.shape)}")
    if num_sequences is not None and (ids_T is None or not is_whole(num_sequences) or not 0 < num_sequences < 1 << 31):
        problems.append(
            f"num_sequences={num_sequences!r} must be a whole number from 1 to 2^31 - 1, beside sequence ids"
        )
    if cut and ids_T is not None and num_sequences is None:
        problems.append(
            "sequence_aux_loss of packs that are cut over ranks (tensor, context parallel) needs num_sequences, and "
            "ids that name the sequences of a pack 0, 1, … on all of these ranks"
        )
    return problems


def nan_unless_named(weights_TK: Tensor, ids_T: Tensor, num_sequences: int) -> Tensor:
    """Weights that dispatch refuses on every rank where a token's sequence is none of 0..num_sequences - 1."""
    ids_T = wide_ids(ids_T)
    return weights_TK.masked_fill((ids_T.clamp(0, num_sequences - 1) != ids_T)[:, None], math.nan)
