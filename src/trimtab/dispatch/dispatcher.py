"""One expert group's dispatch and combine: rows out to the experts, sums back home.

    rows = dispatcher.dispatch(x, ids, weights)        collective; one host sync (none in a group of one)
    y    = dispatcher.combine(experts(rows.x_MD, rows.ids_MK, rows.weights_MK), rows)          collective; none

What comes out of `dispatch` is itself a small MoE layer's input: rows, local expert ids with -1 for slots that
are not this rank's, and weights. Any experts function that returns each row's weighted sum fits in between.

Legend: T local tokens, K experts per token, M' rows received, D model dim, E experts, e local experts, P ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from trimtab.dispatch.autograd import (
    Combine,
    CombineSlots,
    Dispatch,
    DispatchSlots,
    Trained,
    wants_gradient,
    with_others,
)
from trimtab.dispatch.checks import (
    assert_good,
    bad_slots,
    bad_tokens,
    meeting_device,
    name_bytes,
    raise_if_bad,
    rows_problem,
    shape_problems,
)
from trimtab.dispatch.handshake import (
    BAD,
    GRAD,
    NOTHING,
    ROWS,
    SLOTS,
    TOKENS,
    UNUSABLE,
    CallId,
    Shared,
    fill,
    raise_if_desynced,
    raise_if_unlike,
    raise_if_unusable,
)
from trimtab.dispatch.named import NamedTransport
from trimtab.dispatch.plan import plan_ranks, sort_by_rank
from trimtab.dispatch.route import LocalRoute, RankRoute, Route, slots_of
from trimtab.dispatch.transport import Transport, guard_of
from trimtab.errors import ConfigError, DesyncError, InputError
from trimtab.kernels.memory import no_values
from trimtab.layout import experts_per_rank
from trimtab.validation import check_sizes

CombineMode = Literal["sum", "ordered"]
COMBINE_MODES: tuple[CombineMode, ...] = ("sum", "ordered")
_OLD_FIELDS = {"x": "x_MD", "ids": "ids_MK", "weights": "weights_MK"}


def check_combine(combine: str, layer: str = "") -> None:
    """Raises:
    ConfigError: no such way to combine.
    """
    if combine not in COMBINE_MODES:
        raise ConfigError(f"combine={combine!r} is not one of {COMBINE_MODES}", layer=layer)


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """What a rank's experts run on, and the way home. Belongs to one layer call.

    x_MD: [M', D] in the tokens' dtype. With combine="ordered" one row per kept slot.
    ids_MK: [M', K] int32 local expert ids, -1 where a slot is not this rank's. [M', 1] with "ordered".
    weights_MK: [M', K] float32 (float64 for float64 tokens).
    num_slots: how many ids are not -1, or how many at most, where the host knows it.
    """

    x_MD: Tensor
    ids_MK: Tensor
    weights_MK: Tensor
    num_slots: int | None
    route: Route
    sent: Tensor
    slot_row_R: Tensor | None

    def __getattr__(self, name: str) -> Tensor:
        """The names of release 0.1."""
        if name not in _OLD_FIELDS:
            raise AttributeError(f"Dispatched has no attribute {name!r}")
        warnings.warn(f"Dispatched.{name} is now {_OLD_FIELDS[name]}", DeprecationWarning, stacklevel=2)
        value: Tensor = getattr(self, _OLD_FIELDS[name])
        return value


class Dispatcher:
    """Dispatch and combine over one transport.

    Args:
        num_experts: E, over all ranks; rank r owns experts r * e .. r * e + e - 1.
        transport: the expert group, or None where this rank owns all experts.
        combine: "sum" takes the weighted sum over a rank's experts there and sends one row back; "ordered"
            sends every slot back and sums at home in the order of k, so that a token's bits do not depend on
            the number of ranks.
        layer: the layer's name, for errors and to tell layers apart; without one they are told apart by the order
            in which they were built on their guard.
        fingerprint: anything else that must be the same on every rank, such as "hidden 512 swiglu".

    Raises:
        ConfigError: a name that is none, or a number of experts that does not divide over the ranks.
    """

    def __init__(
        self,
        num_experts: int,
        transport: Transport | None = None,
        *,
        combine: CombineMode = "sum",
        layer: str = "",
        fingerprint: str = "",
    ) -> None:
        check_combine(combine, layer)
        check_sizes(num_experts=num_experts)
        self.transport = transport
        self.num_experts = num_experts
        self.ranks = 1 if transport is None else transport.size
        self.experts_per_rank = experts_per_rank(num_experts, self.ranks)
        self.combine_mode = combine
        self.layer = layer
        self.fingerprint = fingerprint
        self.calls = 0
        self.guard = guard_of(transport)
        if self.guard is not None:
            self.layer = layer or f"(unnamed {self.guard.layers})"
            self.guard.layers += 1
        self._named = None if transport is None else NamedTransport(transport, self.layer)
        self._layer_bytes = name_bytes(self.layer)

    def begin(self) -> None:
        """Note that this rank begins its next call, with its router. Optional: tells it from what lies before."""
        if self._runs_eagerly():
            self._eagerly(self.begin)
            return
        with self._alone("route"):
            self._at("route")

    def dispatch(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        w_TK: Tensor,
        token_mask_T: Tensor | None = None,
        *,
        most_slots: int | None = None,
        shared: Shared = NOTHING,
    ) -> Dispatched:
        """Send each token once to each rank that owns one of its experts. Every rank of the group must call.

        Args:
            x_TD: tokens, in float64, float32, bfloat16 or float16, D >= 1, any number of them (ranks may differ).
            ids_TK: global expert ids, int; -1 drops a slot.
            w_TK: routing weights, in one of these dtypes; sums and gradients are taken in float32 at least.
            token_mask_T: bool, True for a real token; the others are not sent and get zero output and gradient.
            most_slots: how many ids are not -1 at most, where less than T * K: what is made for them on a device, or
                in a graph of `torch.compile`, is of so many rows. Over ranks they are counted anyway.
            shared: what other ranks of the group must have as much of as this one.

        Raises:
            InputError: shapes or dtypes other than these; tensors on several devices, sparse, nested or DTensors; ids
                out of range or weights not finite. On every rank of the group. (What ids and weights are is asserted on
                the device, and not raised, where the host does not wait for one: CUDA without a transport.)
            DesyncError: the ranks of the group are not in the same call, or have not as much of what is shared; another
                thread of this rank is in an exchange (`Guard.alone`).
            PeerLost, PhaseTimeout: a rank did not come; where the guard waits, see `trimtab.guard.guard`.
        """
        if self._runs_eagerly():
            return cast(Dispatched, self._eagerly(self.dispatch, x_TD, ids_TK, w_TK, token_mask_T, shared=shared))
        with self._alone("route"):
            return self._dispatch(x_TD, ids_TK, w_TK, token_mask_T, most_slots, shared)

    def _dispatch(
        self, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor, token_mask_T: Tensor | None, most_slots: int | None,
        shared: Shared,
    ) -> Dispatched:  # fmt: skip
        self._at("route")
        self._refuse_shapes(x_TD, ids_TK, w_TK, token_mask_T)
        ids = ids_TK.long().clamp(-2, self.num_experts).to(torch.int32)  # a wild id must not wrap around to a good one
        if token_mask_T is not None:
            ids = ids.masked_fill(~token_mask_T[:, None], -1)
        w = w_TK.to(torch.promote_types(x_TD.dtype, torch.float32))
        bad = bad_slots(ids, w, self.num_experts)
        if self._named is None:
            if torch.compiler.is_compiling():
                from trimtab.dispatch.compiled import checked_ids

                ids = checked_ids(ids, bad, self._layer_bytes, self.num_experts)
            elif no_values(bad.device):
                pass
            elif bad.device.type == "cpu":
                self._raise_if_bad([int(bad)], ids, w)
            else:
                assert_good(bad, self.num_experts, layer=self.layer)
            route: Route = LocalRoute(ids_TK=ids, num_slots=most_slots)
            x, rows_w, rows_ids, sent = x_TD, w, ids, x_TD.new_empty(0)
        else:
            own = wants_gradient(x_TD, w)
            route, wanted = self._connect(ids, w, bad, self._named, x_TD, own, shared)
            w = with_others(w, wanted, own)
            x, rows_w, rows_ids, sent = Dispatch.apply(route, x_TD, w, ids)  # type: ignore[no-untyped-call]
            # From 1, and 0 for slots of other ranks: choosing between values in no order takes four times as long.
            first = self._named.rank * self.experts_per_rank - 1
            rows_ids = rows_ids.contiguous() - first  # strided, ops are 10x slower
            mine = (rows_ids > 0) & (rows_ids <= self.experts_per_rank)
            rows_ids = rows_ids.mul_(mine).sub_(1)
        if self.combine_mode == "sum":
            return Dispatched(
                x_MD=x, ids_MK=rows_ids, weights_MK=rows_w, num_slots=route.num_slots, route=route, sent=sent,
                slot_row_R=None,
            )  # fmt: skip
        slots, slot_csr = slots_of(rows_ids, route.num_slots)
        row_R = slots.div(ids.shape[1], rounding_mode="floor")
        beyond = torch.arange(slots.shape[0], device=slots.device) >= slot_csr.indptr[-1]
        return Dispatched(
            x_MD=DispatchSlots.apply(x, row_R, slot_csr),  # type: ignore[no-untyped-call]
            ids_MK=rows_ids.reshape(-1).index_select(0, slots).masked_fill(beyond, -1)[:, None],
            weights_MK=rows_w.reshape(-1).index_select(0, slots)[:, None],
            num_slots=route.num_slots,
            route=route,
            sent=sent,
            slot_row_R=row_R,
        )

    def combine(self, y: Tensor, rows: Dispatched, params: Iterable[Tensor] = ()) -> Tensor:
        """Weighted expert outputs [M', D], one per row of `rows`, to sums per token [T, D]. Every rank must call.

        params: those of experts that may leave some out, as a loop does that skips experts without rows: they get
            gradients of zero. On a rank without rows `y` would depend on nothing, and where the tokens need no gradient
            either, this combine would have a backward on the other ranks alone, who would wait for it.

        Raises:
            InputError: `y` is not [M', D] like the rows that dispatch gave out, dense, on their device and in float64,
                float32, bfloat16 or float16; on every rank of the group where a guard waits, else here alone.
            DesyncError, PeerLost, PhaseTimeout: as `dispatch`, where a guard waits.
        """
        if self._runs_eagerly():
            return cast(Tensor, self._eagerly(self.combine, y, rows, tuple(params)))
        if problem := rows_problem(y, rows.x_MD):
            rank = None if self.transport is None else self.transport.rank
            rows.route.refuse(InputError(problem, rank=rank, layer=self.layer, phase="combine"), rows.x_MD)
        if params := tuple(params):
            y = Trained.apply(y, *params)  # type: ignore[no-untyped-call]
        if rows.slot_row_R is not None:
            out: Tensor = CombineSlots.apply(rows.route, y, rows.sent, rows.slot_row_R)  # type: ignore[no-untyped-call]
        elif self.transport is None:
            out = y
        else:
            out = Combine.apply(rows.route, y, rows.sent)  # type: ignore[no-untyped-call]
        return out

    def _runs_eagerly(self) -> bool:
        """Whether a graph is being traced that ends here: what goes over ranks reads counts, and is no part of any."""
        return self._named is not None and torch.compiler.is_compiling()

    def _eagerly(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from trimtab.eager import eagerly

        return eagerly(method, *args, **kwargs)

    def _connect(
        self, ids_TK: Tensor, w_TK: Tensor, bad: Tensor, transport: Transport, x_TD: Tensor, grad: bool, shared: Shared
    ) -> tuple[RankRoute, bool]:
        """Sort, count, tell the peers, and check what they told, before any row moves. And whether any rank's `grad`
        says that it wants gradients of what it sends."""
        sort = sort_by_rank(ids_TK.where(ids_TK < self.num_experts, -1), self.experts_per_rank, self.ranks)
        call_id = self._call_id(x_TD, ids_TK)
        message = fill(sort.rows_P, sort.slots_P, ids_TK.shape[0], bad, call_id, grad=grad, shared=shared)
        self._at("count")
        told = transport.handshake(message)
        self.calls += 1
        raise_if_unusable(told.received, self.layer, "count")
        raise_if_desynced(told, transport.rank, call_id, "count")
        raise_if_unlike(told.received, self.layer)
        self._raise_if_bad([header[BAD] for header in told.received], ids_TK, w_TK)
        rows, slots = told.split_sizes(ROWS), told.split_sizes(SLOTS)
        ordered = self.combine_mode == "ordered"
        plan = plan_ranks(sort, sum(rows.outgoing), sum(slots.outgoing), ordered=ordered)
        if plan.row_token_M.shape[0] != sum(rows.outgoing):
            error = DesyncError(
                f"rank {transport.rank} has {plan.row_token_M.shape[0]} rows to send and told its peers of "
                f"{sum(rows.outgoing)}: the transport did not carry what was counted",
                rank=transport.rank, layer=self.layer, phase="count",
            )  # fmt: skip
            if self.guard is not None:
                self.guard.fail(error)
            raise error
        tokens = tuple(header[TOKENS] for header in told.received)
        route = RankRoute(transport=transport, plan=plan, rows=rows, slots=slots, tokens=tokens, call_id=call_id)
        return route, any(header[GRAD] for header in told.received)

    def _call_id(self, x: Tensor, ids: Tensor) -> CallId:
        own = f"{x.dtype}, combine {self.combine_mode}, guard {'off' if self.guard is None else 'on'}"
        return CallId(
            layer=self.layer,
            call=self.calls,
            experts=self.num_experts,
            top_k=ids.shape[-1] if ids.dim() else 0,
            width=x.shape[-1] if x.dim() else 0,
            fingerprint=f"{own}, {self.fingerprint}" if self.fingerprint else own,
        )

    def _alone(self, phase: str) -> AbstractContextManager[None]:
        """For an exchange, see `Guard.alone`."""
        return nullcontext() if self.guard is None else self.guard.alone(self.layer, phase)

    def _at(self, phase: str) -> None:
        """Note where this rank is."""
        if self.guard is not None:
            self.guard.at(self.layer, phase, "forward", self.calls)

    def _refuse_shapes(self, x: Tensor, ids: Tensor, w: Tensor, mask: Tensor | None) -> None:
        problems = shape_problems(x, ids, w, mask)
        if not problems:
            return
        if self._named is not None:  # take part all the same, so that the peers raise instead of waiting
            device = meeting_device(x, ids, w)
            nothing_P = torch.zeros(self.ranks, dtype=torch.int64, device=device)
            call_id = self._call_id(nothing_P, nothing_P)  # what was given may have no shape; nobody compares it
            message = fill(nothing_P, nothing_P, 0, UNUSABLE, call_id)
            self._at("count")
            self._named.handshake(message)
            self.calls += 1
        rank = None if self.transport is None else self.transport.rank
        raise InputError("; ".join(problems), rank=rank, layer=self.layer, phase="dispatch")

    def _raise_if_bad(self, bad_P: list[int], ids_TK: Tensor, w_TK: Tensor) -> None:
        if any(bad_P):
            own = bad_tokens(ids_TK, w_TK, self.num_experts)
            raise_if_bad(bad_P, self.num_experts, layer=self.layer, ranked=self.transport is not None, tokens=own)
