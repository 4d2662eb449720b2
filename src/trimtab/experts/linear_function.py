"""The grouped linear map, forward and backward, block by block.

    y[segment i]  = x[segment i] W_i^T + b_i        zero behind the last segment
    dx[segment i] = dy[segment i] W_i               zero behind the last segment
    dW_i = dy[segment i]^T x[segment i]             db_i = sum of dy[segment i]

With a recipe every operand is quantised and dequantised along the axis that its product contracts, in segments that
are aligned for that: rows are copied into a plan of aligned segments and the results back out of it, so that no row
is lost and no group size is changed.

Legend: R rows as given, S rows as computed (R, or aligned), e groups, A in features, B out features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from trimtab.dispatch.plan import ExpertPlan, plan_experts
from trimtab.experts.main_grad import MainGradMode
from trimtab.experts.per_group import Gradients, take
from trimtab.experts.recipes.base import RecipeState
from trimtab.kernels.grouped import Kernels
from trimtab.kernels.rows import combine_rows, gather_padded

WgradJob = Callable[[], tuple[list[Tensor], list[Tensor]]]


@dataclass(frozen=True, kw_only=True)
class LinearCall:
    """Everything about one call that is not differentiated.

    weights: [e, B, A], or e of [B, A]; biases: [e, B], or e of [B], or none. The parameters themselves, because
    their attributes say where gradients go.
    offsets_e: [e + 1] of the rows as computed. plan: how rows get there; None where they already lie so.
    keep: whether a backward may come.
    defer: takes the work of the weight gradients where they are delayed, else None.
    """

    kernels: Kernels
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    stacked: bool
    offsets_e: Tensor
    plan: ExpertPlan | None
    recipe: RecipeState | None
    main_grad: MainGradMode
    save_original_input: bool
    keep: bool
    defer: Callable[[WgradJob], None] | None

    @property
    def groups(self) -> slice:
        return slice(0, self.offsets_e.shape[0] - 1)

    @property
    def wants_weights(self) -> bool:
        return any(p.requires_grad for p in self.weights)

    @property
    def wants_biases(self) -> bool:
        return any(p.requires_grad for p in self.biases)

    def spread(self, rows_RA: Tensor) -> Tensor:
        """Rows in the weights' dtype, dense, where they are computed: [S, A]."""
        rows_RA = rows_RA.to(self.weights[0].dtype).contiguous()
        return rows_RA if self.plan is None else gather_padded(rows_RA, self.plan.row_R)

    def unspread(self, rows_SA: Tensor) -> Tensor:
        """The transpose of `spread`; zero for rows behind the last segment: [R, A]."""
        return rows_SA if self.plan is None else combine_rows(rows_SA, self.plan.row_bags)


def align(offsets_e: Tensor, rows: int, alignment: int) -> ExpertPlan:
    """A plan that copies `rows` rows, segments at `offsets_e`, into aligned segments."""
    group_R = torch.searchsorted(offsets_e[1:], torch.arange(rows, device=offsets_e.device), right=True)
    return plan_experts(group_R[:, None], offsets_e.shape[0] - 1, alignment=alignment)


def grouped_linear(x_RA: Tensor, call: LinearCall) -> Tensor:
    """[R, B] in x's dtype, computed in the weights' dtype.

    Every parameter gets a gradient of its full shape, by autograd or as `main_grad` and `defer` say. Differentiating
    twice raises.
    """
    params = (*call.weights, *call.biases)
    if call.defer is not None:
        # Autograd must not meet the parameters here: it would fire their hooks now, without a gradient. An empty
        # tensor stands in for them, so that there is a backward even where x needs none.
        anchor = x_RA.new_empty(0).requires_grad_(call.wants_weights or call.wants_biases)
        params = (*(p.detach() for p in params), anchor)
    y: Tensor = _GroupedLinear.apply(call, x_RA, *params)  # type: ignore[no-untyped-call]
    return y


class _GroupedLinear(Function):
    @staticmethod
    def forward(ctx: Any, call: LinearCall, x: Tensor, *params: Tensor) -> Tensor:
        x_SA = call.spread(x)
        weights, biases = _split(call, params)
        y_SB = _product(call, _rows(call, x_SA, "forward"), weights, biases, transpose=False)
        ctx.call, ctx.x_dtype = call, x.dtype
        keep: Tensor | None = None
        if call.keep and call.wants_weights:
            keep = x if call.save_original_input else _rows(call, x_SA, "wgrad")
        ctx.save_for_backward(keep, *params)
        return call.unspread(y_SB).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: LinearCall = ctx.call
        kept, *params = ctx.saved_tensors
        dy_SB = call.spread(dy)
        dx = None
        if ctx.needs_input_grad[1]:
            weights, _ = _split(call, params)
            dx_SA = _product(call, _gradient_rows(call, dy_SB, "dgrad"), weights, (), transpose=True)
            dx = call.unspread(dx_SA).to(ctx.x_dtype)

        # Quantised now, also where the product comes later: scales belong to this step.
        columns_SB = _gradient_rows(call, dy_SB, "wgrad") if call.wants_weights else dy_SB

        def job() -> tuple[list[Tensor], list[Tensor]]:
            return _parameter_gradients(call, kept, columns_SB, dy_SB)

        if call.defer is not None:
            call.defer(job)
            return (None, dx, *(None for _ in params))
        found = {id(p): gradient for p, gradient in zip(*job(), strict=True)}
        return (None, dx, *(found.get(id(p)) for p in (*call.weights, *call.biases)))


def _split(call: LinearCall, params: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The parameters as autograd saved them: weights, biases."""
    n, m = len(call.weights), len(call.biases)
    return tuple(params[:n]), tuple(params[n : n + m])


def _rows(call: LinearCall, x_SA: Tensor, use: str) -> Tensor:
    if call.recipe is None:
        return x_SA
    return call.recipe.activation(x_SA, call.offsets_e, "row" if use == "forward" else "column")


def _gradient_rows(call: LinearCall, dy_SB: Tensor, use: str) -> Tensor:
    if call.recipe is None:
        return dy_SB
    return call.recipe.gradient(dy_SB, call.offsets_e, "row" if use == "dgrad" else "column")


def _product(
    call: LinearCall, rows_SX: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...], *, transpose: bool
) -> Tensor:
    """Rows times each group's W^T (plus bias), or with `transpose` times W, in the weights' dtype: [S, Y]."""
    kernels, dtype = call.kernels, call.kernels.compute_dtype(rows_SX.dtype)
    quantised_eAB = None
    if call.recipe is not None:
        w_eAB = take(weights, call.stacked, call.groups).transpose(1, 2)
        quantised_eAB = call.recipe.weight(w_eAB, "out" if transpose else "in")
    out_features, in_features = weights[0].shape[-2:]
    width = in_features if transpose else out_features
    result_SY = kernels.empty_rows(rows_SX, width, weights[0].dtype, call.offsets_e)
    for block in kernels.blocks(call.offsets_e, rows_SX.shape[0]):
        e, r = block.experts, block.rows
        w_eAB = take(weights, call.stacked, e).transpose(1, 2) if quantised_eAB is None else quantised_eAB[e]
        w_eXY = (w_eAB.transpose(1, 2) if transpose else w_eAB).to(dtype)
        rows = rows_SX[r].to(dtype)
        if dtype == result_SY.dtype:
            out = kernels.grouped_mm(rows, w_eXY, block, result_SY[r])
        else:
            out = kernels.grouped_mm(rows, w_eXY, block)
        if biases:
            out += kernels.expand(take(biases, call.stacked, e).to(dtype), block)
        if dtype != result_SY.dtype:
            result_SY[r] = out
    return result_SY


def _parameter_gradients(
    call: LinearCall, kept: Tensor | None, columns_SB: Tensor, dy_SB: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters that want a gradient, and what autograd gets for each."""
    kernels, rows = call.kernels, dy_SB.shape[0]
    params: list[Tensor] = []
    found: list[Tensor] = []
    if call.wants_weights:
        assert kept is not None
        x_SA = _rows(call, call.spread(kept), "wgrad") if call.save_original_input else kept
        dtype = kernels.compute_dtype(columns_SB.dtype)
        dw = Gradients(call.weights, call.stacked, call.main_grad, "weight")
        for block in kernels.blocks(call.offsets_e, rows):
            x, dy = x_SA[block.rows].to(dtype), columns_SB[block.rows].to(dtype)
            with dw.block(block.experts) as (out_eBA, add):
                kernels.grouped_wgrad(x, dy, block, out_eBA.transpose(1, 2), add=add)
        params += call.weights
        found += dw.close()
    if call.wants_biases:
        dtype = kernels.compute_dtype(dy_SB.dtype)
        db = Gradients(call.biases, call.stacked, "off", "bias")
        for block in kernels.blocks(call.offsets_e, rows):
            with db.block(block.experts) as (out_eB, _):
                out_eB.copy_(kernels.grouped_sum(dy_SB[block.rows].to(dtype), block))
        params += call.biases
        found += db.close()
    wanted = [i for i, p in enumerate(params) if p.requires_grad]
    return [params[i] for i in wanted], [found[i] for i in wanted]
