"""Bugs of counting, of sending rows out and of bringing them home.

Legend: T tokens, K experts per token, M rows sent, M' rows received, B bytes of a row, P ranks, D model dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mutants.patching import Mutant, Patches
from trimtab.dispatch import all_gather, dispatcher, route
from trimtab.dispatch.all_gather import AllGather
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.over_group import pack, unpack
from trimtab.dispatch.plan import RankPlan, RankSort, plan_ranks, sort_by_rank
from trimtab.dispatch.route import Combine, Dispatch, Dispatched, RankRoute, Route
from trimtab.dispatch.transport import SplitSizes
from trimtab.kernels.rows import Csr, combine_rows, gather_rows


def _one_choice_per_rank(p: Patches) -> None:
    @p.around(Dispatcher, "_dispatch")
    def dispatch(original: Any, self: Dispatcher, *args: Any, **options: Any) -> Dispatched:
        rows: Dispatched = original(self, *args, **options)
        if self.transport is None or rows.slot_row_R is not None:
            return rows
        kept = rows.ids_MK >= 0
        return replace(rows, ids_MK=rows.ids_MK.masked_fill(kept & (kept.cumsum(1) > 1), -1), num_slots=None)


def _last_expert(p: Patches) -> None:
    def sort(ids_TK: Tensor, experts_per_rank: int, ranks: int) -> RankSort:
        misled = ids_TK.masked_fill(ids_TK == experts_per_rank * ranks - 1, 0)
        return sort_by_rank(misled, experts_per_rank, ranks)

    p.put(dispatcher, "sort_by_rank", sort)


def _ranks_reversed(p: Patches) -> None:
    @p.around(Dispatcher, "_dispatch")
    def dispatch(original: Any, self: Dispatcher, x: Tensor, ids: Tensor, *args: Any, **options: Any) -> Dispatched:
        e = self.experts_per_rank
        mirrored = (self.ranks - 1 - ids.div(e, rounding_mode="floor")) * e + ids % e
        good = (ids >= 0) & (ids < self.num_experts)
        rows: Dispatched = original(self, x, torch.where(good, mirrored, ids), *args, **options)
        return rows


def _change_plan(p: Patches, change: Any) -> None:
    """change: RankPlan -> RankPlan."""

    def plan(sort: RankSort, num_rows: int, num_slots: int, *, ordered: bool) -> RankPlan:
        made: RankPlan = change(plan_ranks(sort, num_rows, num_slots, ordered=ordered))
        return made

    p.put(dispatcher, "plan_ranks", plan)


def _first_rank(p: Patches) -> None:
    def change(plan: RankPlan) -> RankPlan:
        starts, sizes = plan.token_csr.indptr[:-1], plan.token_csr.indptr.diff()
        offsets = torch.nn.functional.pad(sizes.clamp(max=1).cumsum(0), (1, 0))
        return replace(plan, token_csr=Csr(indices=plan.token_csr.indices[starts[sizes > 0]], indptr=offsets))

    _change_plan(p, change)


def _arrival_order(p: Patches) -> None:
    def change(plan: RankPlan) -> RankPlan:
        csr = plan.slot_csr
        return plan if csr is None else replace(plan, slot_csr=replace(csr, indices=torch.arange(csr.indices.shape[0])))

    _change_plan(p, change)


def _stale(p: Patches) -> None:
    kept: dict[int, Tensor] = {}  # the last result of each width

    def combine(rows: Tensor, csr: Csr, weights: Tensor | None = None) -> Tensor:
        tokens, width = csr.indptr.shape[0] - 1, rows.shape[1]
        if rows.shape[0] or width not in kept:
            kept[width] = combine_rows(rows, csr, weights)
            return kept[width]
        stale = kept[width].to(rows.dtype)
        return torch.cat((stale, stale.new_zeros(tokens, width)))[:tokens]

    p.put(route, "combine_rows", combine)


def _unpermute_empty(p: Patches) -> None:
    def combine(rows: Tensor, csr: Csr, weights: Tensor | None = None) -> Tensor:
        return combine_rows(rows, csr, weights) if rows.shape[0] else rows.new_zeros(0, rows.shape[1])

    p.put(route, "combine_rows", combine)


def _dw_at_home(p: Patches) -> None:
    @p.around(Dispatch, "backward")
    def backward(original: Any, ctx: Any, dx: Tensor, dw: Tensor, *others: Tensor) -> Any:
        if isinstance(ctx.route, RankRoute):
            incoming, rank = ctx.route.rows.incoming, ctx.route.transport.rank
            cuts = [0, *accumulate(incoming)]
            own = torch.zeros_like(dw)
            own[cuts[rank] : cuts[rank + 1]] = dw[cuts[rank] : cuts[rank + 1]]
            dw = own
        return original(ctx, dx, dw, *others)


def _shared_plan(p: Patches) -> None:
    last: list[Route] = []

    def forward(ctx: Any, route: Route, rows: Tensor, sent: Tensor) -> Tensor:
        last[:] = [route]
        made: Tensor = original(ctx, route, rows, sent)
        return made

    def backward(ctx: Any, dy: Tensor) -> Any:
        return None, last[0].dispatch([dy], "backward")[0], None

    original = Combine.forward
    p.put(Combine, "forward", staticmethod(forward))
    p.put(Combine, "backward", staticmethod(backward))


def _reads_padding(p: Patches) -> None:
    def combine(
        self: AllGather, tensors: Sequence[Tensor], splits: SplitSizes, tokens: tuple[int, ...]
    ) -> list[Tensor]:
        totals = [sum(row) for row in splits.everyone]
        flat = all_gather.gather_uneven(pack(tensors), max(totals), self.group, self.guard).flatten(0, 1)
        starts = [0, *accumulate(totals)]
        parts: Sequence[tuple[int, int]] = self._segments(splits)
        mine = torch.cat([flat[start + a : start + b] for start, (a, b) in zip(starts, parts, strict=False)])
        return unpack(mine, tensors)

    p.put(AllGather, "combine", combine)


def _wrong_transpose(p: Patches) -> None:
    def gather(rows: Tensor, index: Tensor) -> Tensor:
        return gather_rows(rows, index.flip(0))

    p.put(route, "gather_rows", gather)


MUTANTS = (
    Mutant(name="one_choice_per_rank", patch=_one_choice_per_rank, look="2r-ep2/*",
           says="a token with two experts on one rank is sent once and computed once"),
    Mutant(name="last_expert_on_wrong_rank", patch=_last_expert, look="2r-ep2/*",
           says="slots of the last expert are sent to rank 0"),
    Mutant(name="ranks_reversed", patch=_ranks_reversed, look="2r-ep2/*",
           says="the expert group's ranks are numbered against the mesh that cut the experts"),
    Mutant(name="first_rank_only", patch=_first_rank, look="2r-ep2/*",
           says="combine takes the rows of a token's first rank and forgets the others"),
    Mutant(name="ordered_by_arrival", patch=_arrival_order, look="2r-ep2-ordered/*",
           says="returned slots are dealt to tokens in the order of arrival"),
    Mutant(name="stale_rows", patch=_stale, look="2r-ep2/*",
           says="where no row comes, the last call's rows are still there (Gloo all-to-all: stale data, no error)"),
    Mutant(name="unpermute_of_no_rows", patch=_unpermute_empty, look="2r-ep2/*",
           says="unpermute of no rows gives [0, D] instead of [T, D] (TransformerEngine)"),
    Mutant(name="dw_not_reduced", patch=_dw_at_home, look="2r-ep2/*",
           says="the gradient of a token's weights lacks what other ranks' experts say"),
    Mutant(name="plan_shared_by_layers", patch=_shared_plan, look="2r-ep2/alternating/*",
           says="the plan is kept by the module, not by the call: the next one overwrites it (torchtitan#2273, #1467)"),
    Mutant(name="allgather_reads_padding", patch=_reads_padding, look="4r-ep4-allgather/*",
           says="the all-gather's table is read as if no rank's rows were padded"),
    Mutant(name="slots_of_wrong_rows", patch=_wrong_transpose, look="1r-local-ordered/*",
           says="rows are spread to slots by one order and summed by another"),
)  # fmt: skip
