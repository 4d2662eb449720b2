"""The grouped linear map as one autograd function: the products of `products.py` around the rows of a call.

With a recipe rows are copied into a plan of aligned segments and the results back out of it, so that no row is lost
and no group size is changed.

Legend: R rows as given, S rows as computed (R, or aligned), e groups, A in features, B out features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from trimtab.autocast import without_autocast
from trimtab.backward import eager_backward, forward_of, needed
from trimtab.experts.casting import cast, with_rows
from trimtab.experts.delayed import Defer, anchor
from trimtab.experts.main_grad import MainGradMode
from trimtab.experts.per_group import Gradients
from trimtab.experts.plan import ExpertPlan, plan_experts
from trimtab.experts.products import GroupWeights, Products, bias_gradients
from trimtab.kernels.grouped import Kernels
from trimtab.kernels.rows import combine_rows, gather_padded


@dataclass(frozen=True, kw_only=True)
class LinearCall:
    """Everything about one call that is not differentiated.

    params: the parameters themselves, because their attributes say where gradients go.
    dtype: what is multiplied in: theirs, or autocast's.
    offsets_e: [e + 1] of the rows as computed. plan: how rows get there; None where they already lie so.
    keep: whether a backward may come.
    defer: takes the work of the weight gradients where they are delayed, else None.
    trained: which weights and then biases wanted a gradient when the call was made; later they may not say so.
    """

    kernels: Kernels
    params: GroupWeights
    dtype: torch.dtype
    products: Products
    offsets_e: Tensor
    plan: ExpertPlan | None
    main_grad: MainGradMode
    save_original_input: bool
    keep: bool
    defer: Defer | None
    trained: tuple[bool, ...]

    @property
    def wants_weights(self) -> bool:
        return any(self.trained[: len(self.params.weights)])

    @property
    def wants_biases(self) -> bool:
        return any(self.trained[len(self.params.weights) :])

    def multiplied(self, params: Sequence[Tensor]) -> GroupWeights:
        """The parameters as autograd gives them, or copies in autocast's dtype for one pass."""
        n, m = len(self.params.weights), len(self.params.biases)
        if self.params.dtype != self.dtype:
            runs = with_rows(self.offsets_e) if self.params.stacked and self.plan is None else None
            params = [cast(p, self.dtype, self.kernels, runs) for p in params[: n + m]]
        return replace(self.params, weights=tuple(params[:n]), biases=tuple(params[n : n + m]))

    def spread(self, rows_RA: Tensor) -> Tensor:
        """Rows as they are multiplied, dense, where they are computed: [S, A]."""
        rows_RA = rows_RA.to(self.dtype).contiguous()
        return rows_RA if self.plan is None else gather_padded(rows_RA, self.plan.row_R)

    def unspread(self, rows_SA: Tensor) -> Tensor:
        """The transpose of `spread`; zero for rows behind the last segment: [R, A]."""
        return rows_SA if self.plan is None else combine_rows(rows_SA, self.plan.row_csr)


def align(offsets_e: Tensor, rows: int, alignment: int) -> ExpertPlan:
    """A plan that copies `rows` rows, segments at `offsets_e`, into aligned segments."""
    group_R = torch.searchsorted(offsets_e[1:], torch.arange(rows, device=offsets_e.device), right=True)
    return plan_experts(group_R[:, None], offsets_e.shape[0] - 1, alignment=alignment)


def grouped_linear(x_RA: Tensor, call: LinearCall) -> Tensor:
    """[R, B] in x's dtype, computed in the call's.

    Every parameter gets a gradient of its full shape, by autograd or as `main_grad` and `defer` say. Differentiating
    twice raises.
    """
    params = (*call.params.weights, *call.params.biases)
    if call.defer is not None:
        params = (*(p.detach() for p in params), anchor(x_RA, call.wants_weights or call.wants_biases))
    with without_autocast():
        y: Tensor = forward_of(_GroupedLinear, call, x_RA, *params)
    return y


class _GroupedLinear(Function):
    @staticmethod
    def forward(ctx: Any, call: LinearCall, x: Tensor, *params: Tensor) -> Tensor:
        x_SA = call.spread(x)
        y_SB = call.products.forward(x_SA, call.multiplied(params))
        ctx.call, ctx.x_dtype = call, x.dtype
        kept: tuple[Tensor, ...] = ()
        if call.keep and call.wants_weights:
            kept = (x,) if call.save_original_input else call.products.keep(x_SA, "activation")
        ctx.save_for_backward(*params, *kept)
        return call.unspread(y_SB).to(x.dtype)

    @staticmethod
    @eager_backward
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: LinearCall = ctx.call
        _, need_x, *needs = needed(ctx)
        wanted = needs if call.defer is None else call.trained
        count, weights = len(needs), len(call.params.weights)
        saved = ctx.saved_tensors
        params, kept = saved[:count], saved[count:]
        dy_SB = call.spread(dy)
        dx = None
        if need_x:
            dx = call.unspread(call.products.dgrad(dy_SB, call.multiplied(params))).to(ctx.x_dtype)

        # Quantised now, also where the product comes later: scales belong to this step.
        columns = call.products.keep(dy_SB, "gradient") if any(wanted[:weights]) else ()

        def gradients() -> list[Tensor | None]:
            return _parameter_gradients(call, wanted, kept, columns, dy_SB)

        if call.defer is None:
            return (None, dx, *gradients())

        def job() -> tuple[list[Tensor], list[Tensor]]:
            pairs = zip((*call.params.weights, *call.params.biases), gradients(), strict=True)
            wanted = [(param, gradient) for param, gradient in pairs if gradient is not None]
            return [param for param, _ in wanted], [gradient for _, gradient in wanted]

        call.defer(job, [*kept, *columns, *([dy_SB] if call.wants_biases else [])])
        return (None, dx, *(None for _ in params))


def _parameter_gradients(
    call: LinearCall, trained: Sequence[bool], kept: tuple[Tensor, ...], columns: tuple[Tensor, ...], dy_SB: Tensor
) -> list[Tensor | None]:
    """What autograd gets for each weight and each bias, None for those that want nothing."""
    own, n = call.params, len(call.params.weights)
    found: list[Tensor | None] = [None] * len(trained)
    if any(trained[:n]):
        x = call.products.keep(call.spread(kept[0]), "activation") if call.save_original_input else kept
        dw = Gradients(own.weights, own.stacked, call.main_grad, "weight", trained=trained[:n])
        call.products.wgrad(x, columns, dw)
        found[:n] = dw.close()
    if any(trained[n:]):
        db = Gradients(own.biases, own.stacked, "off", "bias")
        bias_gradients(call.kernels, call.offsets_e, dy_SB, db)
        found[n:] = db.close()
    return [gradient if wanted else None for gradient, wanted in zip(found, trained, strict=True)]
