"""The expert MLPs of one rank, differentiable: y = sum over a row's experts of w * down(activation(up(x))).

Saved for the backward: the rows, the routing weights and the pre-activations [R, I]. Gathered rows and activations are
computed again. A gate of one's own or a norm behind the experts keeps its rows: see `composed`.

Legend: M rows, K slots per row, R expert rows, e local experts, D model dim, I width of the pre-activations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from trimtab.autograd import forward_of, needed, once_differentiable, without_autocast
from trimtab.errors import ConfigError
from trimtab.experts.expert_call import ExpertCall
from trimtab.experts.expert_call import ExpertWeights as ExpertWeights
from trimtab.experts.ops import experts_backward_op, experts_op, experts_weight_gradients_op
from trimtab.experts.plan import ExpertPlan
from trimtab.experts.weight_grad import Defer, MainGradMode
from trimtab.kernels.api import Backend
from trimtab.kernels.choose import name_of

if TYPE_CHECKING:
    from trimtab.experts.lowered import LoweredProducts

RowFunction = Callable[[Tensor], Tensor]
"""Row by row, differentiable, for any number of rows including none."""


def expert_mlp(
    x_MD: Tensor,
    w_MK: Tensor,
    plan: ExpertPlan,
    weights: ExpertWeights,
    activation: str | RowFunction = "swiglu",
    kernels: Backend | str = "auto",
    *,
    norm: RowFunction | None = None,
    main_grad: MainGradMode = "off",
    defer: Defer | None = None,
    low: tuple[LoweredProducts, LoweredProducts] | None = None,
) -> Tensor:
    """Weighted sum of each row's local experts: [M, D] in x's dtype. Local: no rank waits for another.

    Args:
        x_MD: rows; computed in the parameters' dtype, or in autocast's, see `trimtab.autograd.computed_in`.
        w_MK: routing weights of the slots that `plan` was built from; those of dropped slots are not read.
        activation: a word of `activations.activation_of`, or a function [R, I] -> [R, F] of one's own.
        kernels: those of a `KernelChoice`, or their names joined by commas, which `torch.compile` can trace.
        norm: a function [R, D] -> [R, D] behind the experts, before their outputs are weighted.
        main_grad: where the gradients of `up` and `down` go, see `trimtab.experts.weight_grad`. Biases always have
            ordinary gradients.
        defer: takes the work of the weight and bias gradients at each backward; until it is done the gradients of
            the pre-activations and of the result are kept. Nobody is told of them before `DelayedGradients.run`.
        low: a recipe's products with up and with down, made for this call; the plan's segments are aligned for it.

    Every parameter gets a gradient of its full shape, zeros where no token came. Differentiating twice raises.

    Raises:
        ConfigError: `main_grad`, `defer` or `low` with a function of one's own; `low` with `transposed`; `low` or
            `defer` with adapters or codes; codes with `transposed`.
    """
    dtype = weights.computed_in
    if callable(activation) or norm is not None or (weights.adapters is not None and weights.adapters.dropout):
        if main_grad != "off" or defer is not None or low is not None:
            raise ConfigError(
                "main_grad, delayed weight gradients and recipes take no function of one's own, and no dropout"
            )
        from trimtab.experts.composed import composed_experts

        return composed_experts(x_MD, w_MK, plan, weights, activation, norm, kernels, dtype)
    thin = weights.adapters is not None or weights.codes is not None
    if thin and (low is not None or defer is not None):
        raise ConfigError("experts of codes or with adapters take no recipe, and no weight gradients that come later")
    if weights.transposed and (low is not None or weights.codes is not None):
        raise ConfigError("a recipe takes no transposed weights, and codes lie [e, out, in]")
    call = ExpertCall(
        plan=plan, word=activation, kernels=None if isinstance(kernels, str) else kernels,
        name=kernels if isinstance(kernels, str) else name_of(kernels), weights=weights.lasting(),
        main_grad=main_grad, keep=torch.is_grad_enabled(), defer=defer, low=low,
        trained=() if defer is None else tuple(p is not None and p.requires_grad for p in weights.each),
    )  # fmt: skip
    x = x_MD if x_MD.dtype is dtype else x_MD.to(dtype)
    w = w_MK if w_MK.dtype is torch.float32 else w_MK.to(torch.promote_types(w_MK.dtype, torch.float32))
    inputs = call.inputs(weights, x_MD)
    y: Tensor
    if thin:
        from trimtab.experts.adapted import adapted_experts

        with without_autocast():
            y = adapted_experts(call, weights, x, w)
    elif low is None:
        y = forward_of(_Experts, call, x, w, *inputs)
    else:
        from trimtab.experts.mlp_lowered import LoweredMLP

        with without_autocast():
            y = forward_of(LoweredMLP, call, x, w, *inputs)
    return y if y.dtype is x_MD.dtype else y.to(x_MD.dtype)


class _Experts(Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: ExpertCall,
        x: Tensor,
        w_MK: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        anchor: Tensor | None,
    ) -> Tensor:
        plan, options = list(call.plan), (call.word, call.weights.transposed, call.name)
        y: Tensor
        y, pre = experts_op(x, w_MK, up, down, up_bias, down_bias, plan, *options, call.keep)
        ctx.call, ctx.options = call, options
        ctx.save_for_backward(pre, x, w_MK, up, down, up_bias, down_bias, *plan)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: ExpertCall = ctx.call
        pre, x, w_MK, *rest = ctx.saved_tensors
        params, plan = rest[:4], rest[4:]
        _, need_x, need_w, *needs = needed(ctx)
        reads = (x, w_MK, *params, plan, *ctx.options)
        if call.defer is None:
            grads = call.gradients(needs)
            out, wanted, adds = grads.buffers()
            dx, dw, _ = experts_backward_op(dy, pre, out, wanted, adds, *reads, need_x, False)
            found = grads.close()
        else:
            dx, dw, d_pre = experts_backward_op(dy, pre, [], [False] * 4, [], *reads, need_x, True)
            _defer(call, dy, pre, d_pre, reads)
            found = [None] * 4
        return (None, dx if need_x else None, dw if need_w else None, *found, None)


def _defer(call: ExpertCall, dy: Tensor, pre: Tensor, d_pre: Tensor, reads: tuple[Any, ...]) -> None:
    """Leave the parameters' gradients for later."""

    def job() -> list[tuple[Tensor, Tensor]]:
        grads = call.gradients(())
        out, wanted, adds = grads.buffers()
        experts_weight_gradients_op(dy, pre, d_pre, out, wanted, adds, *reads)
        return grads.deliver()

    assert call.defer is not None
    call.defer(job, call.delayed_reads(reads[0], dy, reads[1]))
