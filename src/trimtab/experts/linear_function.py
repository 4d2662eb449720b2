"""A grouped linear map with state: gradients that go into `main_grad` or come later, or a recipe's products.

With a recipe rows are copied into a plan of aligned segments and the results back out of it, so that no row is lost
and no group size is changed.

Legend: R rows as given, S rows as computed (R, or aligned), e groups, A in features, B out features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from trimtab.backward import eager_backward, forward_of, needed, without_autocast
from trimtab.experts.grouped_linear import segment_sums
from trimtab.experts.plan import ExpertPlan, plan_experts
from trimtab.experts.products import GroupWeights, Products
from trimtab.experts.weight_grad import Defer, MainGradMode, WeightGradient, anchor
from trimtab.kernels.rows import combine_rows, gather_padded


@dataclass(frozen=True, kw_only=True)
class LinearCall:
    """Everything about one call that is not differentiated.

    params: the parameters themselves, because their attributes say where gradients go.
    dtype: what is multiplied in: theirs, or autocast's.
    plan: how rows get to where they are computed; None where they already lie so.
    keep: whether a backward may come. defer: takes the work of the weight gradients where they are delayed.
    trained: which weights and then biases wanted a gradient when the call was made; later they may not say so.
    """

    params: GroupWeights
    dtype: torch.dtype
    products: Products
    plan: ExpertPlan | None
    main_grad: MainGradMode
    keep: bool
    defer: Defer | None
    trained: tuple[bool, ...]

    @property
    def count(self) -> int:
        """Of weights."""
        return len(self.params.weights)

    def multiplied(self, params: Sequence[Tensor]) -> GroupWeights:
        """The parameters as autograd gives them, in the dtype that is multiplied in."""
        cast = tuple(p.to(self.dtype) for p in params)
        return GroupWeights(cast[: self.count], cast[self.count : len(self.trained)], self.params.stacked)

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


def linear_with_state(x_RA: Tensor, call: LinearCall) -> Tensor:
    """[R, B] in x's dtype, computed in the call's.

    Every parameter gets a gradient of its full shape, by autograd or as `main_grad` and `defer` say. Differentiating
    twice raises.
    """
    params = (*call.params.weights, *call.params.biases)
    if call.defer is not None:
        params = (*(p.detach() for p in params), anchor(x_RA, any(call.trained)))
    with without_autocast():
        y: Tensor = forward_of(_WithState, call, x_RA, *params)
    return y


class _WithState(Function):
    @staticmethod
    def forward(ctx: Any, call: LinearCall, x: Tensor, *params: Tensor) -> Tensor:
        x_SA = call.spread(x)
        y_SB = call.products.forward(x_SA, call.multiplied(params))
        ctx.call, ctx.x_dtype = call, x.dtype
        kept = call.products.keep(x_SA, "activation") if call.keep and any(call.trained[: call.count]) else ()
        ctx.save_for_backward(*params, *kept)
        return call.unspread(y_SB).to(x.dtype)

    @staticmethod
    @eager_backward
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: LinearCall = ctx.call
        _, need_x, *needs = needed(ctx)
        wanted = needs if call.defer is None else call.trained
        saved = ctx.saved_tensors  # once: a checkpoint hands them out once
        params, kept = saved[: len(needs)], saved[len(needs) :]
        dy_SB = call.spread(dy)
        dx = None
        if need_x:
            dx = call.unspread(call.products.dgrad(dy_SB, call.multiplied(params))).to(ctx.x_dtype)
        # Quantized now, also where the product comes later: scales belong to this step.
        columns = call.products.keep(dy_SB, "gradient") if any(wanted[: call.count]) else ()
        if call.defer is None:
            return (None, dx, *_parameter_gradients(call, wanted, kept, columns, dy_SB))

        def job() -> list[tuple[Tensor, Tensor]]:
            gradients = _parameter_gradients(call, wanted, kept, columns, dy_SB)
            pairs = zip((*call.params.weights, *call.params.biases), gradients, strict=True)
            return [(param, gradient) for param, gradient in pairs if gradient is not None]

        call.defer(job, [*kept, *columns, *([dy_SB] if any(wanted[call.count :]) else [])])
        return (None, dx, *(None for _ in params))


def _parameter_gradients(
    call: LinearCall, wanted: Sequence[bool], kept: tuple[Tensor, ...], columns: tuple[Tensor, ...], dy_SB: Tensor
) -> list[Tensor | None]:
    """What autograd gets for each weight and each bias, None for those that want nothing."""
    own, n = call.params, call.count
    found: list[Tensor | None] = [None] * len(wanted)
    if any(wanted[:n]):
        names = ["weight"] if own.stacked else [f"weight{i}" for i in range(n)]
        modes: list[MainGradMode] = [call.main_grad if want else "off" for want in wanted[:n]]
        dw = [WeightGradient(*each) for each in zip(own.weights, modes, names, strict=True)]
        out, adds = [gradient.buffer for gradient in dw], [gradient.adds for gradient in dw]
        call.products.wgrad(kept, columns, out, adds, own.stacked)
        found[:n] = [gradient.close() for gradient in dw]
    if any(wanted[n:]):
        products = call.products
        found[n:] = segment_sums(dy_SB, products.offsets_e, own.biases[0].dtype, own.stacked, products.name)
    return [gradient if want else None for gradient, want in zip(found, wanted, strict=True)]
