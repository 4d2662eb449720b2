"""The expert MLP with adapters, with codes in place of weights, or both, differentiable: thin products beside the
others, and the delta b a is never built; codes are decoded where they are read, forward and backward.

Saved for the backward beside what the experts save: scale x a^T, [R, r] for each pair.

Legend: M rows, R expert rows, e local experts, K slots per row, r rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from trimtab.autograd import forward_of, needed, once_differentiable
from trimtab.experts.adapted_ops import adapted_backward_op, adapted_op
from trimtab.experts.adapters import Adapters, Pair, lying_as
from trimtab.experts.expert_call import ExpertCall, ExpertWeights

WHOLE = 8
"""Ranks are filled up to a multiple with zeros: products on a GPU take rows of 16 bytes."""


def adapted_experts(call: ExpertCall, weights: ExpertWeights, x: Tensor, w_MK: Tensor) -> Tensor:
    """As `expert_mlp` of weights that have some of these."""
    experts = weights.down.shape[0]
    adapters, codes = weights.adapters or Adapters(), weights.codes
    pairs: list[Tensor] = []
    for name in ("up", "down"):
        pair: Pair | None = getattr(adapters, name)
        if pair is None:
            ins, outs = (x.shape[1], weights.width) if name == "up" else (weights.hidden, x.shape[1])
            pair = Pair(a=x.new_empty(1, 0, ins), b=x.new_empty(1, outs, 0))
        a, b = pair.a, pair.b
        if more := -pair.rank % WHOLE:
            a, b = torch.nn.functional.pad(a, (0, 0, 0, more)), torch.nn.functional.pad(b, (0, more))
        pairs += [t.expand(experts, -1, -1) for t in (a, b)]  # whose backward sums what experts share
    scales = [1.0 if pair is None else pair.scale for pair in (adapters.up, adapters.down)]
    options = (scales, [], "") if codes is None else (scales, [codes.up, codes.down], codes.format)
    y: Tensor = forward_of(_Adapted, call, options, x, w_MK, *weights.each, *pairs)
    return y


class _Adapted(Function):
    @staticmethod
    def forward(ctx: Any, call: ExpertCall, more: tuple[Any, ...], x: Tensor, w_MK: Tensor, *params: Any) -> Tensor:
        weights, pairs, plan = params[:4], list(params[4:]), list(call.plan)
        options = (call.word, call.weights.transposed, call.name)
        y: Tensor
        y, pre, *thin = adapted_op(x, w_MK, *weights, plan, *options, pairs, *more, call.keep)
        scales, code_scales, form = more
        ctx.call, ctx.more, ctx.options = call, (scales, form), options
        ctx.save_for_backward(pre, *thin, x, w_MK, *weights, *pairs, *plan, *code_scales)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: ExpertCall = ctx.call
        pre, u_up, u_down, x, w_MK, *rest = ctx.saved_tensors
        places = len(call.plan)
        weights, pairs, plan, code_scales = rest[:4], rest[4:8], rest[8 : 8 + places], list(rest[8 + places :])
        scales, form = ctx.more
        _, _, need_x, need_w, *needs = needed(ctx)
        grads = call.gradients(needs[:4])
        out, wanted, adds = grads.buffers()
        trained = any(needs[4:])
        dx, dw, *thin = adapted_backward_op(
            dy, pre, u_up, u_down, out, wanted, adds, x, w_MK, *weights, plan, *ctx.options,
            pairs, scales, code_scales, form, need_x, trained,
        )  # fmt: skip
        of_pairs = [
            lying_as(d.to(p.dtype), p) if need else None for d, p, need in zip(thin, pairs, needs[4:], strict=True)
        ]
        return (None, None, dx if need_x else None, dw if need_w else None, *grads.close(), *of_pairs)
