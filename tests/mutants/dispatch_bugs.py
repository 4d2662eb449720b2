"""Bugs of counting, of sending rows out and of bringing them home; and with tokens that several ranks share."""

from __future__ import annotations

<<<<<<< HEAD
from mutants.patching import Edit, bug
=======
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

    def forward(ctx: Any, route: Route, rows: Tensor, *sent: Tensor | None) -> Tensor:
        last[:] = [route]
        made: Tensor = original(ctx, route, rows, *sent)
        return made

    def backward(ctx: Any, dy: Tensor) -> Any:
        return None, last[0].dispatch([dy], "backward")[0], None, None

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
>>>>>>> exchange

DISPATCH, EXCHANGE = (f"dispatch.dispatcher:Dispatcher.{name}" for name in ("_dispatch", "_exchange"))
PLAN, PARTS = "dispatch.plan:plan_ranks", "dispatch.route:combine_parts"
TOKEN_CSR = "csr_of(slot_row_N, first_N, sort.tokens, num_rows)"
SHARD, LAYER = "dispatch.sequence_shard:", "parallel.moe:ParallelMoE.forward"
TP3, EP2 = "3r-ep3-tp3-replicated-fsdp/*", "2r-ep2/*"

# fmt: off
MUTANTS = (
    bug("one_choice_per_rank", "a token with two experts on one rank is sent once and computed once",
        Edit(EXCHANGE, "ids_MK = ids_MK.mul_(mine).sub_(1)", """\
ids_MK = ids_MK.mul_(mine).sub_(1)
    ids_MK = ids_MK.masked_fill((ids_MK >= 0).cumsum(1) > 1, -1)"""), look=EP2),
    bug("last_expert_on_wrong_rank", "slots of the last expert are sent to rank 0",
        Edit("dispatch.plan:sort_by_rank", "ids_N = ids_TK.reshape(-1)",
             "ids_N = ids_TK.masked_fill(ids_TK == experts_per_rank * ranks - 1, 0).reshape(-1)"), look=EP2),
    bug("ranks_reversed", "the expert group's ranks are numbered against the mesh that cut the experts",
        Edit(DISPATCH, "if self.transport is None:", """\
e, good = self.experts_per_rank, (ids_TK >= 0) & (ids_TK < self.num_experts)
    mirrored = (self.ranks - 1 - ids_TK.div(e, rounding_mode="floor")) * e + ids_TK % e
    ids_TK = mirrored.where(good, ids_TK)
    if self.transport is None:"""), look=EP2),
    bug("first_rank_only", "combine takes the rows of a token's first rank and forgets the others",
        Edit(PLAN, "return RankPlan(", f"""\
csr = {TOKEN_CSR}
    some = csr.indptr.diff().clamp(max=1)
    return RankPlan("""),
        Edit(PLAN, f"token_csr={TOKEN_CSR}", """\
token_csr=Csr(
            indices=csr.indices[csr.indptr[:-1][some > 0]], indptr=torch.nn.functional.pad(some.cumsum(0), (1, 0))
        )"""), look=EP2),
    bug("ordered_by_arrival", "returned slots are dealt to tokens in the order of arrival",
        Edit(PLAN, "inverse_of(order_N), sort.kept_N", "sort.kept_N.cumsum(0) - 1, sort.kept_N"),
        look="2r-ep2-ordered/*"),
    bug("stale_rows",
        "where no row comes, the last call's rows are still there (Gloo all-to-all: stale data, no error)",
        Edit(PARTS, "first = parts[0]", """\
kept, tokens = globals().setdefault("_KEPT", {}), csr.indptr.shape[0] - 1  # by width
    if not parts[0].shape[0]:
        stale = [kept.get(part.shape[1], part).to(part.dtype) for part in parts]
        return [torch.cat((t, t.new_zeros(tokens, t.shape[1])))[:tokens] for t in stale]
    kept.update({part.shape[1]: combine_rows(part, csr) for part in parts})
    first = parts[0]"""), look=EP2),
    bug("unpermute_of_no_rows", "unpermute of no rows gives [0, D] instead of [T, D] (TransformerEngine)",
        Edit(PARTS, "first = parts[0]", """\
if not parts[0].shape[0]:
        return [part.new_zeros(0, part.shape[1]) for part in parts]
    first = parts[0]"""), look=EP2),
    bug("dw_not_reduced", "the gradient of a token's weights lacks what other ranks' experts say",
        Edit("dispatch.route:Dispatch.backward", "dx_TD, dw_TK = ", """\
each = dw.split(list(ctx.route.rows.incoming))
    dw = torch.cat([part * (rank == ctx.route.transport.rank) for rank, part in enumerate(each)])
    dx_TD, dw_TK = """), look=EP2),
    bug("plan_shared_by_layers",
        "the plan is kept by the module, not by the call: the next one overwrites it (torchtitan#2273, #1467)",
        Edit("dispatch.route:Combine.forward", "ctx.route = route", "Combine.last = route"),
        Edit("dispatch.route:Combine.backward", "ctx.route", "Combine.last"), look="2r-ep2/alternating/*"),
    bug("allgather_reads_padding", "the all-gather's table is read as if no rank's rows were padded",
        Edit("dispatch.all_gather:AllGather.combine", "parts = [rows[source, start:end]", """\
starts = [0, *accumulate(sum(row) for row in splits.everyone)]
    parts = [rows.flatten(0, 1)[starts[source] + start : starts[source] + end]"""), look="4r-ep4-allgather/*"),
    bug("slots_of_wrong_rows", "rows are spread to slots by one order and summed by another",
        Edit("dispatch.route:DispatchSlots.forward", "row_R)", "row_R.flip(0))"), look="1r-local-ordered/*"),
    bug("batch_1_offset",
        "shards are cut at local + T_local * rank, which is right for one sequence only (torchtitan#3604)",
        Edit(SHARD + "take_shard", "full = x.view", """\
first = sum(layout.tokens(before) for before in range(rank))
    return x[first : first + layout.tokens(rank)].contiguous()
    full = x.view"""), look=TP3),
    bug("joined_by_rank", "shards are put together rank after rank instead of by position (torchtitan#3604)",
        Edit(SHARD + "join_shards", "shards = [", """\
return torch.cat([gathered[rank, : layout.tokens(rank)] for rank in range(layout.ranks)])
    shards = ["""), look=TP3),
    bug("remainder_lost",
        "every rank takes L // ranks positions and the rest is nobody's (torchtitan#3577, #3619, #3622)",
        Edit("layout:SequenceLayout.even", "shard_cuts(length, ranks)",
             "tuple(rank * (length // ranks) for rank in range(ranks + 1))"), look=TP3),
    bug("replicas_double_counted",
        "the output's gradient, which every rank holds, is summed over the ranks: gradients x TP",
        Edit(SHARD + "_Moved.backward", "return _moved(", """\
if joined:
        dy = dy.clone()
        dist.all_reduce(dy, group=group)
    return _moved("""), look=TP3),
    bug("padded_by_repeats", "short shards are filled up with repeated tokens, and the gradient counts them",
        Edit(LAYER, "refuse_transforms(", """\
import torch

    length, longest = x.shape[-2], torch.tensor(x.shape[-2])
    if not self.shares:
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    more = (int(longest) - length) * (length > 0)
    x, token_mask, ids = (
        t if t is None else torch.cat((t, t[:, -1:].expand(-1, more, *t.shape[2:])), 1) for t in (x, token_mask, ids)
    )
    refuse_transforms("""),
        Edit(LAYER, "with standing_in(places, summed):\n", """\
with standing_in(places, summed):
        out = super().forward(x, token_mask=token_mask, ids=ids)
        repeats = out.y[:, length:].sum(1, keepdim=True)
        return out._replace(y=out.y[:, :length] + repeats - repeats.detach())  # cut off, but not from the gradient
"""), look="2r-ep2-tp2-sharded/u*/*"),
    bug("empty_rank_leaves", "a rank without tokens returns early and its peers wait in the exchange",
        Edit(LAYER, "group = self.tp_group", """\
if not x.numel() and self.dispatcher.transport is not None:
        loads = x.new_zeros(self.dispatcher.num_experts).long()
        return MoEOutput(y=x.clone(), losses={}, loads_E=loads, ids_TK=loads[:0, None])
    group = self.tp_group"""), look=EP2, hangs=True),
    bug("router_not_summed", "the router's gradient is not summed over tensor-parallel ranks (torchtitan#4054)",
        Edit(LAYER, "places = self._places()", "places = []"), look="2r-ep2-tp2-sharded/*"),
)
