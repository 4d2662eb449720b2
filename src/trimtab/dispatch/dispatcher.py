"""One expert group's dispatch and combine: rows out to the experts, sums back home.

    rows = dispatcher.dispatch(x, ids, weights)        collective; one host sync (none in a group of one)
    y    = dispatcher.combine(experts(rows.x_MD, rows.ids_MK, rows.weights_MK), rows)          collective; none

Legend: T local tokens, K experts per token, M' rows received, D model dim, E experts, e local experts, P ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from trimtab.autograd import outside_graph
from trimtab.dispatch import checks, facts
from trimtab.dispatch import route as routes
from trimtab.dispatch.exchange import count_message, error_scope
from trimtab.dispatch.facts import NO_FACTS, CallId, Facts
from trimtab.dispatch.options import CombineMode, ReplicationConfig, check_combine
from trimtab.dispatch.plan import RankSort, plan_ranks, sort_by_rank
from trimtab.dispatch.route import Dispatched, LocalRoute, RankRoute
from trimtab.dispatch.transport import Handshake, Transport, layer_frame
from trimtab.errors import DesyncError, InputError
from trimtab.kernels.tensor_checks import static_by_default
from trimtab.layout import experts_per_rank
from trimtab.routing.scores import count_ids
from trimtab.validation import check_sizes

if TYPE_CHECKING:
    from trimtab.dispatch.replica_plan import ReplicaPlan
    from trimtab.dispatch.replica_route import ReplicaPlanner
    from trimtab.guard.guard import Guard


class Dispatcher:
    """Dispatch and combine over one transport.

    Args:
        num_experts: E, over all ranks; rank r owns experts r * e .. r * e + e - 1.
        transport: the expert group, or None where this rank owns all experts.
        combine: "sum" takes the weighted sum over a rank's experts there and sends one row back; "ordered" sends every
            slot back and sums at home in the order of k, so that bits do not depend on the number of ranks.
        layer: the layer's name, for errors; without one layers are numbered in the order they were built.
        fingerprint: anything else that must be the same on every rank, such as "hidden 512 swiglu".
        replication: copy hot experts to other ranks for one call, by this rule, the same on every rank. None, and in a
            group of one: slots go to their expert's own rank. The experts must run replicas (`Dispatched.replicas`).
        sizes: for experts that split rows on the host: on a device `Dispatched.sizes_e` comes with the counts.
        etp: the ranks that share each expert's F. Under a guard an error of this group's fails theirs, which would
            wait; and where experts are replicated they plan together, for each computes the slots of all.

    replicated: the plan of the last call; None where nothing is replicated.

    Raises:
        ConfigError: a name that is none, or a number of experts that does not divide over the ranks.
    """

    def __init__(
        self, num_experts: int, transport: Transport | None = None, *, combine: CombineMode = "sum", layer: str = "",
        fingerprint: str = "", replication: ReplicationConfig | None = None, sizes: bool = False,
        etp: Transport | None = None,
    ) -> None:  # fmt: skip
        check_combine(combine, layer)
        check_sizes(num_experts=num_experts)
        self.transport = transport
        self.num_experts = num_experts
        self.ranks = 1 if transport is None else transport.size
        self._rank = None if transport is None else transport.rank
        self.experts_per_rank = experts_per_rank(num_experts, self.ranks)
        self.combine_mode = combine
        self.layer = layer
        self.fingerprint = fingerprint
        self.sizes = sizes
        self.calls = 0
        self.guard: Guard | None = getattr(transport, "guard", None)
        if self.guard is not None:
            self.layer = layer or f"(unnamed {self.guard.layers})"
            self.guard.layers += 1
        self._run, self._name = layer_frame(self.layer), checks.name_bytes(self.layer)
        self._etp_guard: Guard | None = getattr(etp, "guard", None)
        self.replicated: ReplicaPlan | None = None
        self.replication: ReplicationConfig | None = None
        self._planner: ReplicaPlanner | None = None
        if replication is not None and transport is not None:
            from trimtab.dispatch.replica_route import ReplicaPlanner

            self.replication = replication
            self._planner = ReplicaPlanner(replication, num_experts, transport, etp, self._run)
        self._places = self.experts_per_rank * (1 if self._planner is None else 2)
        self._weights: tuple[Any, str] = (), ""

    def begin(self) -> None:
        """Note that this rank begins its next call, with its router. Optional: tells it from what lies before."""
        if self.guard is not None and torch.compiler.is_compiling():
            outside_graph(self.begin)
        elif self.guard is not None:
            with self.guard.alone(self.layer, "route"):
                self._at("route")

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor, token_mask_T: Tensor | None = None) -> Dispatched:
        """Send each token once to each rank that owns one of its experts. Every rank of the group must call.

        Args:
            x_TD: tokens, in float64, float32, bfloat16 or float16, D >= 1, any number of them (ranks may differ).
            ids_TK: global expert ids, int; -1 drops a slot.
            w_TK: routing weights, in one of these dtypes; sums and gradients are taken in float32 at least.
            token_mask_T: bool, True for a real token; the others are not sent and get zero output and gradient.

        Raises:
            InputError: shapes or dtypes other than these; tensors on several devices, sparse, nested or DTensors; ids
                out of range or weights not finite (on CUDA without a transport these two are asserted on the device).
                On every rank of the group.
            DesyncError: the ranks are not in the same call; another thread of this rank is in an exchange.
            PeerLost, PhaseTimeout: a rank did not come, where the guard waits.
        """
        problems = checks.shape_problems(x_TD, ids_TK, w_TK, token_mask_T)
        return self._dispatch(x_TD, ids_TK, w_TK, token_mask_T, problems=problems)

    def _dispatch(
        self, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor, mask_T: Tensor | None = None, *,
        most_slots: int | None = None, facts: Facts = NO_FACTS, problems: Sequence[str] = (),
    ) -> Dispatched:  # fmt: skip
        """`dispatch` of tensors that the caller has checked, with the `problems` that were found. most_slots: how many
        ids are not -1 at most, where less than T * K. facts: what the ranks must have alike beside the call."""
        if self.transport is None:
            self._refuse(problems, x_TD, ids_TK, w_TK)
            ids_TK, w_TK = checks.prepared(x_TD, ids_TK, w_TK, mask_T)
            ids_TK = checks.checked_ids(ids_TK, w_TK.detach(), self._name, self.num_experts)
            rows = Dispatched(
                x_MD=x_TD, ids_MK=ids_TK, weights_MK=w_TK, num_slots=most_slots, route=LocalRoute(ids_TK), sent=ids_TK
            )
        elif torch.compiler.is_compiling():  # an exchange reads counts, and is in no graph
            sent = outside_graph(self._dispatch, x_TD, ids_TK, w_TK, mask_T, facts=facts, problems=problems)
            return cast(Dispatched, sent)
        else:
            alone = nullcontext() if self.guard is None else self.guard.alone(self.layer, "route")
            with alone, error_scope(self._etp_guard, self.guard):
                self._at("route")
                self._refuse(problems, x_TD, ids_TK, w_TK)
                ids_TK, w_TK = checks.prepared(x_TD, ids_TK, w_TK, mask_T)
                rows = self._exchange(self.transport, x_TD, ids_TK, w_TK, facts)
        return rows if self.combine_mode == "sum" else routes.by_slot(rows)

    def _exchange(self, transport: Transport, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor, given: Facts) -> Dispatched:
        ids_TK = ids_TK.clamp(-2, self.num_experts).to(torch.int32)  # a wild id must not wrap around to a good one
        own, call = routes.wants_gradient(x_TD, w_TK), self._call_id(x_TD, ids_TK)
        known_TK = ids_TK.where(ids_TK < self.num_experts, -1)
        sent_TK, plan, columns = (known_TK, None, {}) if self._planner is None else self._planner.place(known_TK, call)
        sort = sort_by_rank(sent_TK, self._places, self.ranks)
        values: dict[int, Tensor | int] = {facts.GRAD: own, **columns}
        if call.sized:
            values[facts.COLUMNS] = count_ids(sent_TK.long(), call.sized * self.ranks).view(self.ranks, -1)
        met = self._count(transport, sort, ids_TK, w_TK, call, values, given)
        route = self._route(transport, sort, met, call)
        w_TK = routes.require_grad_if_any(w_TK, any(theirs[facts.GRAD] for theirs in met.received), own)
        x_MD, w_MK, ids_MK, sent = routes.Dispatch.apply(route, x_TD, w_TK, sent_TK)  # type: ignore[no-untyped-call]
        # From 1, and 0 for slots of other ranks: choosing between values in no order takes four times as long.
        ids_MK = ids_MK.contiguous() - (transport.rank * self._places - 1)  # strided, ops are 10x slower
        mine = (ids_MK > 0) & (ids_MK <= self._places)
        ids_MK = ids_MK.mul_(mine).sub_(1)
        n = sum(route.slots.incoming)
        rows = Dispatched(x_MD=x_MD, ids_MK=ids_MK, weights_MK=w_MK, num_slots=n, route=route, sent=sent)
        if call.sized:
            rows.sizes_e = [*map(sum, zip(*(theirs[facts.COLUMNS :] for theirs in met.received), strict=True))]
        if self._planner is not None and plan is not None:
            rows.replicas = self._planner.route(plan, route, met, compared=bool(given.weights))
            self.replicated = plan
        return rows

    def weights_fact(self, experts: nn.Module, word: str = "", more: Iterable[tuple[str, Tensor]] = ()) -> str:
        """`Facts.weights` of these experts with `more` tensors, made again only where one of them has changed; "" where
        no experts are replicated. word: what else must be alike, such as what runs them."""
        if self.replication is None:
            return ""
        named = chain(experts.named_parameters(), experts.named_buffers(), more)
        key = word, tuple((name, t.dtype, tuple(t.shape), t.requires_grad) for name, t in named)
        if key != self._weights[0]:
            each = (f"{name} {dtype} {[*shape]}{' trained' * trained}" for name, dtype, shape, trained in key[1])
            self._weights = key, f"{word}: ".removeprefix(": ") + ", ".join(each)
        return self._weights[1]

    def combine(self, y: Tensor, rows: Dispatched, params: Iterable[Tensor] = ()) -> Tensor:
        """Weighted expert outputs [M', D], one per row of `rows`, to sums per token [T, D]. Every rank must call.

        Args:
            y: [M', D], weighted outputs of the experts.
            rows: what `dispatch` gave out, of the same call.
            params: those of experts that may leave some out, as a loop does that skips experts without rows: they get
                gradients of zero, so that this combine has a backward on every rank.

        Raises:
            InputError: `y` is not [M', D] like the rows that dispatch gave out, dense, on their device and of a dtype
                that dispatch takes; on every rank of the group where a guard waits, else here alone.
            DesyncError, PeerLost, PhaseTimeout: as `dispatch`, where a guard waits.
        """
        if self.transport is not None and torch.compiler.is_compiling():
            return cast(Tensor, outside_graph(self.combine, y, rows, tuple(params)))
        if problem := checks.rows_problem(y, rows.x_MD):
            rows.route.refuse(InputError(problem, rank=self._rank, layer=self.layer, phase="combine"), rows.x_MD)
        if params := tuple(params):
            y = routes.ZeroGradients.apply(y, *params)  # type: ignore[no-untyped-call]
        if rows.slot_row_R is not None or self.transport is not None:
            y = routes.Combine.apply(rows.route, y, rows.sent, rows.slot_row_R)  # type: ignore[no-untyped-call]
        return y

    def _count(
        self, transport: Transport, sort: RankSort, ids_TK: Tensor, w_TK: Tensor, call: CallId,
        values: dict[int, Tensor | int], given: Facts,
    ) -> Handshake:  # fmt: skip
        """Exchange counts, and compare facts, before any row moves."""
        count = checks.bad_slots if static_by_default(ids_TK) else checks.count_bad
        values |= {facts.SLOTS: sort.slots_P, facts.TOKENS: sort.tokens}
        values[facts.BAD] = count(ids_TK, w_TK, self.num_experts)
        message = count_message(sort.rows_P, call, values, given)
        self._at("count")
        met: Handshake = self._run(transport.handshake, message)
        self.calls += 1
        facts.compare(met, transport.rank, call, "count", given.weights)
        bad_P = [theirs[facts.BAD] for theirs in met.received]
        checks.raise_if_bad(bad_P, ids_TK, w_TK, self.num_experts, layer=self.layer, ranked=True)
        return met

    def _route(self, transport: Transport, sort: RankSort, met: Handshake, call: CallId) -> RankRoute:
        rows, slots = met.split_sizes(facts.ROWS), met.split_sizes(facts.SLOTS)
        plan = plan_ranks(sort, sum(rows.outgoing), sum(slots.outgoing), ordered=self.combine_mode == "ordered")
        if plan.row_token_M.shape[0] != sum(rows.outgoing):
            what = f"{plan.row_token_M.shape[0]} rows are there to be sent, and {sum(rows.outgoing)} were counted"
            error = DesyncError(what, rank=transport.rank, layer=self.layer, phase="count")
            if self.guard is not None:
                self.guard.fail(error)
            raise error
        tokens = tuple(theirs[facts.TOKENS] for theirs in met.received)
        return RankRoute(
            transport=transport, guard=self.guard, run=self._run, plan=plan, rows=rows, slots=slots, tokens=tokens,
            call=call,
        )  # fmt: skip

    def _call_id(self, x: Tensor, ids: Tensor) -> CallId:
        own = f"{x.dtype}, combine {self.combine_mode}, guard {'off' if self.guard is None else 'on'}"
        if self._planner is not None:
            own += f", {self._planner.config}"
        return CallId(
            layer=self.layer, number=self.calls, experts=self.num_experts, top_k=ids.shape[-1] if ids.dim() else 0,
            width=x.shape[-1] if x.dim() else 0, fingerprint=f"{own}, {self.fingerprint}" if self.fingerprint else own,
            sized=self._places if self.sizes and static_by_default(x) else 0,
        )  # fmt: skip

    def _at(self, phase: str) -> None:
        if self.guard is not None:
            self.guard.at(self.layer, phase, "forward", self.calls)

    def _refuse(self, problems: Sequence[str], *given: Tensor) -> None:
        """Raise InputError for problems; over a transport after taking part, so that peers raise instead of waiting."""
        if not problems:
            return
        if self.transport is not None:
            nothing_P = torch.zeros(self.ranks, dtype=torch.int64, device=checks.meeting_device(*given))
            call = self._call_id(nothing_P, nothing_P)  # what was given may have no shape; nobody compares it
            with suppress(InputError):
                if self._planner is not None:
                    self._planner.gather(nothing_P.new_zeros(self.num_experts), call, usable=False)
                self._at("count")
                self._run(self.transport.handshake, count_message(nothing_P, call, {facts.BAD: facts.UNUSABLE}))
                self.calls += 1
        raise InputError("; ".join(problems), rank=self._rank, layer=self.layer, phase="dispatch")
