"""Low-rank adapters on the experts (LoRA, Hu et al. 2021, arXiv 2106.09685), by thin products beside those that there
are; the delta b a is never built:

    x W^T + scale (x a^T) b^T

Saved for the backward beside what the experts save: scale x a^T, [R, r] for each pair.

Legend: M rows, R expert rows, e local experts, D model dim, I width of the pre-activations, F expert hidden dim,
r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from trimtab.backward import forward_of, needed, once_differentiable
from trimtab.experts.adapted_ops import adapted_backward_op, adapted_op

if TYPE_CHECKING:
    from trimtab.experts.expert_call import ExpertCall


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One adapter of one weight [e, out, in].

    a: [e, r, in], or [1, r, in] that all experts share. b: [e, out, r] or [1, out, r], its rows in the order of the
    weight's outputs (a gate and up in one: gate first, or in turn where the weight has them so).
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0

    @property
    def rank(self) -> int:
        return self.a.shape[1]


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Of both weights of the experts; None where one has none. dropout: of the rows that go into `a`, in training."""

    up: Pair | None = None
    down: Pair | None = None
    dropout: float = 0.0


def added(pairs: Sequence[Pair]) -> Pair | None:
    """One pair that gives the sum of all; None of none."""
    if len(pairs) < 2:
        return next(iter(pairs), None)
    experts = max(max(p.a.shape[0], p.b.shape[0]) for p in pairs)
    scale = pairs[0].scale
    a = torch.cat([p.a.expand(experts, -1, -1) for p in pairs], 1)
    b = torch.cat([(p.b if p.scale == scale else p.b * (p.scale / scale)).expand(experts, -1, -1) for p in pairs], 2)
    return Pair(a=a, b=b, scale=scale)


def gate_and_up(gate: Pair | None, up: Pair | None, hidden: int) -> Pair | None:
    """One pair of `gate_up` from a gate's and an up's own, each [e, F, D]; hidden: F."""

    def placed(pair: Pair | None, before: int) -> list[Pair]:
        if pair is None:
            return []
        return [replace(pair, b=torch.nn.functional.pad(pair.b, (0, 0, before, hidden - before)))]

    return added(placed(gate, 0) + placed(up, hidden))


WHOLE = 8
"""Ranks are filled up to a multiple with zeros: products on a GPU take rows of 16 bytes."""


def adapted_experts(call: ExpertCall, x: Tensor, w_MK: Tensor, adapters: Adapters) -> Tensor:
    """As `expert_mlp` of weights with these."""
    experts = call.weights.down.shape[0]
    pairs: list[Tensor] = []
    for name in ("up", "down"):
        pair: Pair | None = getattr(adapters, name)
        if pair is None:
            weight = call.weights.down
            pair = Pair(a=weight.new_empty(1, 0, _in(call, name)), b=weight.new_empty(1, _out(call, name), 0))
        a, b = pair.a, pair.b
        if more := -pair.rank % WHOLE:
            a, b = torch.nn.functional.pad(a, (0, 0, 0, more)), torch.nn.functional.pad(b, (0, more))
        pairs += [t.expand(experts, -1, -1) for t in (a, b)]  # whose backward sums what experts share
    scales = [1.0 if pair is None else pair.scale for pair in (adapters.up, adapters.down)]
    y: Tensor = forward_of(_Adapted, call, scales, x, w_MK, *call.weights.each, *pairs)
    return y


def _in(call: ExpertCall, name: str) -> int:
    """Values that a row has before a weight."""
    down, turned = call.weights.down, call.weights.transposed
    return down.shape[2 if turned else 1] if name == "up" else down.shape[1 if turned else 2]


def _out(call: ExpertCall, name: str) -> int:
    return call.weights.width if name == "up" else _in(call, "up")


class _Adapted(Function):
    @staticmethod
    def forward(ctx: Any, call: ExpertCall, scales: list[float], x: Tensor, w_MK: Tensor, *params: Any) -> Tensor:
        weights, pairs, plan = params[:4], [p.contiguous() for p in params[4:]], list(call.plan)
        options = (call.word, call.weights.transposed, call.name)
        y: Tensor
        y, pre, *thin = adapted_op(x, w_MK, *weights, plan, *options, pairs, scales, call.keep)
        ctx.call, ctx.scales, ctx.options = call, scales, options
        ctx.save_for_backward(pre, *thin, x, w_MK, *weights, *params[4:], *plan)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: ExpertCall = ctx.call
        pre, u_up, u_down, x, w_MK, *rest = ctx.saved_tensors
        weights, pairs, plan = rest[:4], rest[4:8], rest[8:]
        _, _, need_x, need_w, *needs = needed(ctx)
        grads = call.gradients(needs[:4])
        out, wanted, adds = grads.buffers()
        trained = any(needs[4:])
        dx, dw, *thin = adapted_backward_op(
            dy, pre, u_up, u_down, out, wanted, adds, x, w_MK, *weights, plan, *ctx.options,
            [p.contiguous() for p in pairs], ctx.scales, need_x, trained,
        )  # fmt: skip
        of_pairs = [d.to(p.dtype) if need else None for d, p, need in zip(thin, pairs, needs[4:], strict=True)]
        return (None, None, dx if need_x else None, dw if need_w else None, *grads.close(), *of_pairs)
