"""The autograd pair: each one's backward is the other, so both directions issue the same collectives.

    Dispatch   forward P,   backward P^T     tokens and routing weights -> rows
    Combine  forward P^T, backward P       rows -> tokens

Neither saves a tensor, and neither can be differentiated twice (it raises). Combine also takes `sent`, of no elements,
which Dispatch gave out beside the rows: so Dispatch's backward follows its own on every rank, even where the experts in
between returned rows that depend on nothing (a loop over experts does, where none has a row). Nobody else reads it, so
its gradient, None, is added to no other.

Legend: T local tokens, K experts per token, M' rows received, R kept slots received, D model dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from trimtab.backward import once_differentiable
from trimtab.dispatch.route import Route
from trimtab.kernels.rows import Csr, combine_rows, gather_rows


def wants_gradient(x_TD: Tensor, w_TK: Tensor) -> bool:
    """Whether what this rank sends is to have a gradient, so that its `Dispatch` has a backward."""
    return torch.is_grad_enabled() and (x_TD.requires_grad or w_TK.requires_grad)


def with_others(w_TK: Tensor, wanted: bool, own: bool) -> Tensor:
    """The weights, with a gradient that nobody reads where it is other ranks alone who want theirs: a backward is one
    of all ranks. wanted: whether any rank does; own: whether this one does.

    A rank without a graph, under `torch.no_grad` or in a reentrant checkpoint of inputs that need no gradient, takes
    part in no backward, whatever others want."""
    return w_TK.clone().requires_grad_() if wanted and not own and torch.is_grad_enabled() else w_TK


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
    """Rows [M', D] -> tokens [T, D]. `sent` is Dispatch's."""

    @staticmethod
    def forward(ctx: Any, route: Route, rows: Tensor, sent: Tensor) -> Tensor:
        ctx.route = route
        return _whole(route.combine([rows])[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.route.dispatch([dy_TD], "backward")[0], None


class Trained(Function):
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


class CombineSlots(Function):
    """One row per kept slot [R, D], in the order (row, k) -> tokens [T, D], summed at home in the order of k.

    The same map as DispatchSlots^T then Combine, with the sum taken in one place; so its backward is theirs.
    """

    @staticmethod
    def forward(ctx: Any, route: Route, rows_RD: Tensor, sent: Tensor, row_R: Tensor) -> Tensor:
        ctx.route, ctx.row_R = route, row_R
        return _whole(route.combine_slots(rows_RD))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[None, Tensor, None, None]:
        (dy,) = ctx.route.dispatch([dy_TD], "backward")
        return None, gather_rows(dy, ctx.row_R), None, None


def _whole(fresh: Tensor) -> Tensor:
    """The same memory, no longer a view of what a kernel wrote: an in-place sum on it keeps the hooks on it, FSDP's.

    Within a graph of `torch.compile` nothing is a view of what a kernel wrote.
    """
    if torch.compiler.is_compiling():
        return fresh
    return fresh.new_empty(0).set_(fresh.untyped_storage(), fresh.storage_offset(), fresh.shape, fresh.stride())
