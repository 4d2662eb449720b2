"""A route, the sparse linear map of one layer call, P, with its transpose; and the autograd pair over it.

    Dispatch   forward P,   backward P^T     tokens and routing weights -> rows on the ranks that own their experts
    Combine    forward P^T, backward P       rows -> sum per token, back home

Neither saves a tensor. Combine also takes `sent`, of no elements, which Dispatch gave out beside the rows: so
Dispatch's backward follows its own on every rank, even where the experts returned rows that depend on nothing.

Legend: T local tokens, K experts per token, M' rows received, R kept slots received, D model dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import Function

from trimtab.autograd import not_in_graphs, once_differentiable
from trimtab.dispatch.exchange import Direction, Exchange, agree_on_rows
from trimtab.dispatch.plan import RankPlan
from trimtab.dispatch.transport import SplitSizes
from trimtab.errors import InputError
from trimtab.kernels.rows import Csr, combine_rows, csr_of, gather_rows

if TYPE_CHECKING:
    from trimtab.dispatch.replica_route import ReplicaRoute


class LocalRoute:
    """The identity: all experts are on this rank, nothing moves and nothing is counted."""

    def __init__(self, ids_TK: Tensor) -> None:
        self.ids_TK = ids_TK

    def dispatch(self, tensors: Sequence[Tensor], direction: Direction = "forward") -> list[Tensor]:
        return list(tensors)

    def combine(
        self, tensors: Sequence[Tensor], direction: Direction = "forward", *, slots: bool = False
    ) -> list[Tensor]:
        if not slots:
            return list(tensors)
        kept_N = self.ids_TK.reshape(-1) >= 0
        csr = csr_of(kept_N.cumsum(0) - 1, kept_N, self.ids_TK.shape[0])
        return [combine_rows(rows_RD, csr) for rows_RD in tensors]

    def refuse(self, error: InputError, like: Tensor) -> NoReturn:
        raise error


@dataclass(frozen=True, kw_only=True)
class RankRoute(Exchange):
    """One layer call on one rank, each of whose methods is a collective of the group: tokens to rows by `plan`, and an
    exchange over `transport`. `direction` says whose turn it is: the transpose of the one is the other's backward.
    """

    plan: RankPlan
    rows: SplitSizes
    slots: SplitSizes
    tokens: tuple[int, ...]

    @not_in_graphs
    def dispatch(self, tensors: Sequence[Tensor], direction: Direction = "forward") -> list[Tensor]:
        """P: tensors [T, *] -> [M', *], rows grouped by source rank, in token order within one."""
        phase = "dispatch" if direction == "forward" else "combine"
        send = partial(self.transport.dispatch, tensors, self.plan.row_token_M, self.rows, self.tokens)
        return self.move(phase, direction, self.rows, tensors[:1], send)

    @not_in_graphs
    def combine(
        self, tensors: Sequence[Tensor], direction: Direction = "forward", *, slots: bool = False
    ) -> list[Tensor]:
        """P^T: tensors [M', *] -> [T, *], summed per token in at least float32, in the order of its slots. slots: of a
        row for each kept slot, [R, *] in the order (row, k), which all come home."""
        phase = "combine" if direction == "forward" else "dispatch"
        splits, csr = (self.slots, self.plan.slot_csr) if slots else (self.rows, self.plan.token_csr)
        splits = splits.reversed()
        assert csr is not None
        send = partial(self.transport.combine, tensors, splits, self.tokens)
        return combine_parts(self.move(phase, direction, splits, tensors[:1], send), csr)

    def refuse(self, error: InputError, like: Tensor) -> NoReturn:
        """Raise `error` in place of a combine, on every rank that would wait for this one."""
        if self.guard is not None and like.device.type == "cpu":
            with suppress(InputError), self.guard.alone(self.call.layer, "combine"):
                splits = self.rows.reversed()
                agree_on_rows(self.transport, self.guard, splits, self.call, "combine", "forward", None, like.device)
        raise error


Route = LocalRoute | RankRoute


def combine_parts(parts: Sequence[Tensor], csr: Csr) -> list[Tensor]:
    """`combine_rows` of each part [n, *], which lie side by side in the same rows or each alone.

    Side by side, all parts of the first one's dtype come out of one sum over the whole row: to sum a part whose rows
    are not adjacent, kernels would copy it first. The others, which are narrow, are summed alone.
    """
    first = parts[0]
    stride, storages = first.stride(0), {part.untyped_storage()._cdata for part in parts}
    if len(parts) == 1 or len(storages) > 1 or stride == first.shape[1]:  # alone, a part may have padding too
        return [combine_rows(part, csr) for part in parts]
    summed = combine_rows(first.as_strided((first.shape[0], stride), (stride, 1)), csr)
    starts = [part.storage_offset() - first.storage_offset() for part in parts]
    return [
        summed[:, start : start + part.shape[1]] if part.dtype == first.dtype else combine_rows(part, csr)
        for part, start in zip(parts, starts, strict=True)
    ]


def wants_gradient(x_TD: Tensor, w_TK: Tensor) -> bool:
    """True where the rows that this rank sends have a gradient, so that its `Dispatch` has a backward."""
    return torch.is_grad_enabled() and (x_TD.requires_grad or w_TK.requires_grad)


def require_grad_if_any(w_TK: Tensor, any_wants: bool, own: bool) -> Tensor:
    """Make the weights require grad where another rank needs a backward, whose collectives involve every rank: a
    gradient that nobody reads. own: whether this rank needs one already. A rank without a graph, as under
    `torch.no_grad`, takes part in no backward, whatever others want."""
    return w_TK.clone().requires_grad_() if any_wants and not own and torch.is_grad_enabled() else w_TK


class Dispatch(Function):
    """(x [T, D], weights [T, K], ids [T, K]) -> the same three for the rows of this rank, [M', *], and `sent`."""

    @staticmethod
    def forward(
        ctx: Any, route: Route, x_TD: Tensor, w_TK: Tensor, ids_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.route = route
        x, w, ids = route.dispatch([x_TD, w_TK, ids_TK])
        ctx.mark_non_differentiable(ids)
        return x, w, ids, x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, dw: Tensor, *_: Tensor) -> tuple[None, Tensor, Tensor, None]:
        dx_TD, dw_TK = ctx.route.combine([dx, dw], "backward")
        return None, dx_TD, dw_TK, None


class Combine(Function):
    """Rows [M', D] -> tokens [T, D]. `sent` is Dispatch's. row_R: of rows [R, D] as DispatchSlots makes them, whose
    transpose is taken along, with one sum, at home, in the order of k."""

    @staticmethod
    def forward(ctx: Any, route: Route, rows: Tensor, sent: Tensor, row_R: Tensor | None) -> Tensor:
        ctx.route, ctx.row_R = route, row_R
        (y_TD,) = route.combine([rows], slots=row_R is not None)
        return y_TD.data  # no view of another: an in-place sum on it keeps its hooks, FSDP's

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[None, Tensor, None, None]:
        (dy,) = ctx.route.dispatch([dy_TD], "backward")
        return None, dy if ctx.row_R is None else gather_rows(dy, ctx.row_R), None, None


class DispatchSlots(Function):
    """Rows [M', D] -> one row per kept slot [R, D], in the order (row, k). Local."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_R: Tensor, csr: Csr) -> Tensor:
        ctx.csr = csr
        return gather_rows(rows, row_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_RD: Tensor) -> tuple[Tensor, None, None]:
        return combine_rows(d_RD.contiguous(), ctx.csr), None, None


class ZeroGradients(Function):
    """Identity on `y` that puts parameters into its graph, with gradients of zero: what a loop over experts leaves out
    because no row of this rank needs it still gets a gradient, as collectives of a backward expect on every rank."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *params: Tensor) -> Tensor:
        ctx.params = [(p.shape, p.dtype, p.device) for p in params]
        return y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        return dy, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.params)


@dataclass(kw_only=True)
class Dispatched:
    """Input of a rank's experts, itself that of a small MoE layer, and the way home, of one layer call: any function
    that returns each row's weighted sum fits in between. With combine="ordered" a row per kept slot.

    x_MD: [M', D] in the tokens' dtype.
    ids_MK: [M', K] int local expert ids, -1 where a slot is not this rank's. [M', 1] with "ordered".
    weights_MK: [M', K] float32 (float64 for float64 tokens).
    num_slots: how many ids are not -1, or how many at most, where the host knows it.
    sizes_e: slots of each local expert, on the host; None unless a `Dispatcher` with sizes=True exchanged them.
    replicas: with replicated experts, the way of the weights; ids of replicas follow those of the rank's own experts.
    """

    x_MD: Tensor
    ids_MK: Tensor
    weights_MK: Tensor
    num_slots: int | None
    route: Route
    sent: Tensor
    slot_row_R: Tensor | None = None
    sizes_e: list[int] | None = None
    replicas: ReplicaRoute | None = None

    @property
    def known(self) -> dict[str, Any]:
        """Options of `ExpertMLP.forward` beside the rows; `replicas` where there are such, which other experts lack."""
        return {"num_slots": self.num_slots} | ({} if self.replicas is None else {"replicas": self.replicas})


def by_slot(rows: Dispatched) -> Dispatched:
    """One row per kept slot, which all come home."""
    kept_N = (rows.ids_MK >= 0).reshape(-1)
    slot_N = torch.arange(kept_N.shape[0], device=kept_N.device)  # row * K + k
    csr = csr_of(slot_N, kept_N, rows.ids_MK.shape[0], rows.num_slots)
    slots, place_R = csr.indices, torch.arange(csr.indices.shape[0], device=slot_N.device)
    row_R, beyond = slots.div(rows.ids_MK.shape[1], rounding_mode="floor"), place_R >= csr.indptr[-1]
    return replace(
        rows,
        x_MD=DispatchSlots.apply(rows.x_MD, row_R, Csr(indices=place_R, indptr=csr.indptr)),  # type: ignore[no-untyped-call]
        ids_MK=rows.ids_MK.reshape(-1).index_select(0, slots).masked_fill(beyond, -1)[:, None],
        weights_MK=rows.weights_MK.reshape(-1).index_select(0, slots)[:, None],
        slot_row_R=row_R,
    )
