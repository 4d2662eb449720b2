"""One block of cases through the real code, forward and backward, on ranks in this process, against the truth.

`check` returns None, or what is wrong: the first differing value of the first stage that differs.

Legend: P ranks, C cases, T tokens of a rank, K experts per token, e local experts, M rows received, R expert rows,
D width.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from fuzz.cases import Case
from fuzz.layer import LinearExperts
from fuzz.truth import Truth, truth_of
from fuzz.world import MemoryGroup, MemoryTransport, Turns
from trimtab.dispatch import sequence_shard
from trimtab.dispatch.all_gather import AllGather
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.route import Dispatched
from trimtab.dispatch.transport import Transport
from trimtab.errors import first_line
from trimtab.experts import plan as plans
from trimtab.experts.plan import ExpertPlan
from trimtab.layout import segment_offsets

Layout = tuple[int, tuple[int, ...]]
"""Sequences, and the cuts of each over the ranks."""


class Wrong(Exception):
    """A value differs from the truth."""


class _Gathered(AllGather):
    """The real all-gather transport on a group in memory."""

    def __init__(self, group: MemoryGroup) -> None:
        self.group, self.rank, self.size = cast(Any, group), group.rank(), group.size()
        self.guard = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank saw. dx_rows, dy_rows: gradients of the rows that it received and gave back."""

    index_T: Tensor
    rows: Dispatched
    plan: ExpertPlan
    y_rows: Tensor
    dx_rows: Tensor
    dy_rows: Tensor
    y: Tensor
    dx: Tensor
    dw: Tensor
    y_full: Tensor


def check(cases: Sequence[Case]) -> str | None:
    """Run cases of one shape side by side in one world; what is wrong, if anything."""
    with _memory(cases[0].shape.poisoned):
        truth = truth_of(cases)
        layout = None
        if truth.shape.lengths is not None:
            batch = truth.case_T.shape[0] // max(sum(truth.shape.lengths), 1)
            layout = batch, (0, *accumulate(truth.shape.lengths))
        turns = Turns(truth.shape.ranks)
        try:
            outcomes = turns.run(lambda rank: _rank(rank, turns, truth, layout))
            _compare(truth, outcomes, layout)
        except Wrong as error:
            return str(error)
        except Exception as error:  # whatever the code under test throws is the finding
            frames = [f for f in traceback.extract_tb(error.__traceback__) if "trimtab" in f.filename]
            place = f" at {frames[-1].name} ({frames[-1].filename.rpartition('trimtab/')[2]}:{frames[-1].lineno})"
            return f"{first_line(error, typed=True)}{place}"
    return None


@contextmanager
def _memory(poisoned: bool) -> Iterator[None]:
    """Fresh memory holds NaN, so that reading what was not written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(poisoned)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _transport(rank: int, turns: Turns, kind: str) -> Transport | None:
    if kind == "none":
        return None
    return MemoryTransport(turns, rank) if kind == "direct" else _Gathered(MemoryGroup(turns, rank))


def _rank(rank: int, turns: Turns, truth: Truth, layout: Layout | None) -> Outcome:
    """The layer on one rank, as a model runs it."""
    shape = truth.shape
    if layout is None:
        index_T = (truth.holder_T == rank).nonzero().view(-1)
        x, ids, w, dy, real = (
            t.index_select(0, index_T) for t in (truth.x_TD, truth.ids_TK, truth.w_TK, truth.dy_TD, truth.real_T)
        )
    else:
        every = torch.arange(truth.case_T.shape[0])
        index_T, x, ids, w, dy, real = (
            _sharded(t, *layout, rank) for t in (every, truth.x_TD, truth.ids_TK, truth.w_TK, truth.dy_TD, truth.real_T)
        )
    x.requires_grad_()
    w.requires_grad_()
    transport = _transport(rank, turns, shape.transport)
    dispatcher = Dispatcher(shape.ranks * truth.cases * shape.experts, transport, combine=shape.combine, layer="fuzz")
    rows = dispatcher.dispatch(x, ids, w, real)
    plan = plans.plan_experts(
        rows.ids_MK,
        dispatcher.experts_per_rank,
        alignment=shape.alignment,
        num_slots=rows.num_slots if "counted" in shape.plan else None,
        static="static" in shape.plan,
    )
    scale, shift = truth.scale_PCe[rank].reshape(-1), truth.shift_PCeD[rank].reshape(-1, shape.width)
    y_rows = LinearExperts.apply(rows.x_MD, rows.weights_MK, plan, scale, shift)  # type: ignore[no-untyped-call]
    y = dispatcher.combine(y_rows, rows)
    rows.x_MD.retain_grad()
    y_rows.retain_grad()
    y.backward(dy)  # type: ignore[no-untyped-call]
    y_full = y.detach()
    if layout is not None:
        (batch, cuts), group = layout, cast(Any, MemoryGroup(turns, rank))
        y_full = y_full.view(batch, cuts[rank + 1] - cuts[rank], shape.width)
        y_full = sequence_shard.join_shards(y_full, cuts, group).flatten(0, 1)
    return Outcome(
        index_T=index_T, rows=rows, plan=plan, y_rows=y_rows.detach(), y=y.detach(), y_full=y_full,
        dx_rows=_grad(rows.x_MD), dy_rows=_grad(y_rows), dx=_grad(x), dw=_grad(w),
    )  # fmt: skip


def _sharded(t: Tensor, batch: int, cuts: tuple[int, ...], rank: int) -> Tensor:
    """This rank's positions of every sequence, of flat tokens [T, *]."""
    mine = sequence_shard.take_shard(t.view(batch, cuts[-1], t.shape[1:].numel()), cuts, rank)
    return mine.view(batch * (cuts[rank + 1] - cuts[rank]), *t.shape[1:])


def _grad(t: Tensor) -> Tensor:
    if t.grad is None:
        raise Wrong("a tensor that needs a gradient has none after backward")
    return t.grad


def _compare(truth: Truth, outcomes: list[Outcome], layout: Layout | None) -> None:
    for rank, o in enumerate(outcomes):
        if layout is not None:
            batch, cuts = layout
            places = torch.arange(batch * cuts[-1]).view(batch, cuts[-1])[:, slice(*cuts[rank : rank + 2])].flatten()
            _same(f"rank {rank}: tokens of its shard", o.index_T, places)
    order_T = torch.cat([o.index_T for o in outcomes])
    for rank, o in enumerate(outcomes):
        _compare_rows(truth, order_T, rank, o.rows)
        _compare_plan(truth, rank, o.rows, o.plan)
    for rank, o in enumerate(outcomes):
        _same(f"rank {rank}: y", o.y, truth.y_TD.index_select(0, o.index_T))
        _same(f"rank {rank}: gradient of the weights", o.dw, truth.dw_TK.index_select(0, o.index_T))
        _same(f"rank {rank}: gradient of the tokens", o.dx, truth.dx_TD.index_select(0, o.index_T))
        if layout is not None:
            _same(f"rank {rank}: y of all shards", o.y_full, truth.y_TD)
    sent = sum(_dot(o.rows.x_MD.detach(), o.dx_rows) for o in outcomes)
    _same("<P x, dy> and <x, P^T dy> of dispatch", sent, sum(_dot(truth.x_TD[o.index_T], o.dx) for o in outcomes))
    home = sum(_dot(o.y, truth.dy_TD[o.index_T]) for o in outcomes)
    _same("<P^T x, dy> and <x, P dy> of combine", home, sum(_dot(o.y_rows, o.dy_rows) for o in outcomes))


def _compare_rows(truth: Truth, order_T: Tensor, rank: int, rows: Dispatched) -> None:
    """Each token once to each rank that needs it (each slot with "ordered"), by source rank, in token order."""
    shape, e = truth.shape, truth.shape.experts
    place = f"rank {rank}, received"
    mine_TK = (truth.kept_TK & (truth.local_TK // e == rank)).index_select(0, order_T)
    ids_TK = truth.ids_TK.index_select(0, order_T) - rank * truth.cases * e
    w_TK = truth.w_TK.index_select(0, order_T)
    if shape.transport == "none":
        token_M = order_T
    else:
        token_M = order_T[mine_TK.any(1)]
    if shape.combine == "ordered":
        token_M = order_T.repeat_interleave(mine_TK.sum(1))
        ids, w = ids_TK[mine_TK][:, None], w_TK[mine_TK][:, None]
        _same(f"{place} weights", rows.weights_MK, w)
    else:
        here = slice(None) if shape.transport == "none" else mine_TK.any(1)
        ids = ids_TK.masked_fill(~mine_TK, -1)[here]
        _same(f"{place} weights", rows.weights_MK.masked_fill(ids < 0, 0), w_TK[here].masked_fill(ids < 0, 0))
    _same(f"{place} expert ids", rows.ids_MK, ids)
    x = truth.x_TD.index_select(0, token_M)
    unread = (ids < 0).all(1, keepdim=True)
    _same(f"{place} tokens", rows.x_MD.detach().masked_fill(unread, 0), x.masked_fill(unread, 0))
    if rows.num_slots is not None:
        _same(f"{place} number of slots", rows.num_slots, int(mine_TK.sum()))


def _compare_plan(truth: Truth, rank: int, rows: Dispatched, plan: ExpertPlan) -> None:
    """Each kept slot once, in its expert's segment, in slot order; segments where `segment_offsets` puts them."""
    place = f"rank {rank}, plan"
    counts_e = truth.counts_PCe[rank].reshape(-1)
    offsets = segment_offsets(counts_e.tolist(), truth.shape.alignment)
    offsets_e = torch.tensor(offsets)
    _same(f"{place} counts", plan.counts_e, counts_e)
    _same(f"{place} offsets", plan.offsets_e, offsets_e)
    total, rows_R = plan.slot_R.shape[0], torch.arange(plan.slot_R.shape[0])
    if total < offsets[-1] or ("static" not in truth.shape.plan and total != offsets[-1]):
        raise Wrong(f"{place}: {total} expert rows, expected {offsets[-1]}")
    expert_R = torch.searchsorted(offsets_e[1:], rows_R, right=True)
    inside_R = rows_R < (offsets_e[:-1] + counts_e).index_select(0, expert_R.clamp(max=counts_e.shape[0] - 1))
    _same(f"{place} rows that hold a slot", plan.slot_R >= 0, inside_R)
    slots, experts = plan.slot_R[inside_R], expert_R[inside_R]
    _same(f"{place} experts of the segments", rows.ids_MK.reshape(-1).index_select(0, slots), experts)
    key = experts * (rows.ids_MK.numel() + 1) + slots
    _same(f"{place} slots in order", (key[1:] > key[:-1]).all().view(1), torch.ones(1, dtype=torch.bool))
    _same(f"{place} rows of the slots", plan.row_R[inside_R], slots // rows.ids_MK.shape[1])


def _dot(a: Tensor, b: Tensor) -> float:
    """<a, b> without what nobody may read: there the gradient is zero."""
    return float((a.double() * b.double()).masked_fill(b == 0, 0).sum())


def _same(name: str, ours: Tensor | float, truth: Tensor | float) -> None:
    """Equal, bit for bit of what counts; else says where the first difference is and shows both values."""
    if not isinstance(ours, Tensor) or not isinstance(truth, Tensor):
        if ours != truth:
            raise Wrong(f"{name}: {ours} and {truth}")
        return
    if ours.shape != truth.shape:
        raise Wrong(f"{name}: shape {tuple(ours.shape)}, expected {tuple(truth.shape)}")
    truth = truth.to(ours.dtype)
    if not torch.equal(ours, truth):
        where = tuple((ours != truth).nonzero()[0].tolist())
        raise Wrong(f"{name} {list(where)}: got {ours[where].item():g}, expected {truth[where].item():g}")
