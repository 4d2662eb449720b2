"""What a place of the grid of pairs computes, in float64: activations, products expert by expert, and what a recipe
makes of their operands.

Legend: E experts or groups, S kept slots (of a linear, rows in segments), I inputs and O outputs of one weight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from helpers.comparing import cut
from helpers.recipe_cases import KINDS, RECIPES
from helpers.stand_ins import PAIRS
from trimtab import oracle
from trimtab.experts.activations import activation_of, clamped

LOW = {name: (RECIPES[name], RECIPES[name]) for name in KINDS}
LOW |= {f"hardware {name}": (kind(backend="hardware"), same) for name, (kind, same) in PAIRS.items()}
"""By name, a recipe and what it is the same as, emulated. Stand-ins play the hardware."""
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 6e-3}


def by_expert(rows_SI: Tensor, w_EOI: Tensor, e_S: Tensor) -> Tensor:
    """Each row times its expert's weight: [S, O]. Rows come expert by expert."""
    parts = rows_SI.split(torch.bincount(e_S, minlength=len(w_EOI)).tolist())
    return torch.cat([part @ w_OI.t() for part, w_OI in zip(parts, w_EOI, strict=True)])


def linear_truth(x_RI: Tensor, w_EOI: Tensor, b_EO: Tensor, dy_RO: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """A grouped linear map in float64: y, and the gradients of x, w and b. Rows behind the last segment are zero in y
    and dx, and count nowhere else."""
    leaves = [t.detach().double().requires_grad_() for t in (x_RI, w_EOI, b_EO)]
    used, e_S = sum(sizes), torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    y = by_expert(leaves[0][:used], leaves[1], e_S) + leaves[2][e_S]
    grads = torch.autograd.grad(y, leaves, dy_RO[:used].detach().double())
    return torch.cat([y.detach(), y.new_zeros(len(x_RI) - used, y.shape[1])]), *grads


def _clamped(alpha: float, limit: float, shift: float, gate: Tensor, up: Tensor) -> Tensor:
    gate, up = cut(gate, limit), cut(up, limit, -limit)
    return (up + shift) * gate * torch.sigmoid(alpha * gate)


def _gated_gelu(pre: Tensor, approximate: str) -> Tensor:
    gate, up = pre.chunk(2, -1)
    return nn.functional.gelu(gate, approximate=approximate) * up


INTERLEAVED, HALVES = clamped(1.702, 1.5, 1.0, interleaved=True), clamped(1.3, 1.5, 0.5, interleaved=False)
TRUTHS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": oracle.swiglu, "geglu": partial(_gated_gelu, approximate="none"),
    "geglu_tanh": partial(_gated_gelu, approximate="tanh"),
    "clamped_swiglu": lambda pre: _clamped(1.702, 7.0, 1.0, *pre.chunk(2, -1)),
    "relu_squared": lambda pre: torch.relu(pre).square(), "gelu": nn.functional.gelu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
    INTERLEAVED: lambda pre: _clamped(1.702, 1.5, 1.0, pre[..., ::2], pre[..., 1::2]),
    HALVES: lambda pre: _clamped(1.3, 1.5, 0.5, *pre.chunk(2, -1)),
}  # fmt: skip


class Activated(Function):
    """A known activation on pre-activations as experts in `dtype` round them."""

    @staticmethod
    def forward(ctx: Any, pre: Tensor, word: str, dtype: torch.dtype) -> Tensor:
        ctx.activation, ctx.pre = activation_of(word), pre.to(dtype)
        return ctx.activation.forward(ctx.pre).double()

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, None, None]:
        return ctx.activation.backward(ctx.pre, dh.to(ctx.pre.dtype)).double(), None, None


class Quantized(Function):
    """Three products of what a recipe makes of their operands, laid out in aligned segments from Python integers.

    What is quantized once more behind them is multiplied in float32: a value next to a border must not change sides.
    """

    @staticmethod
    def forward(
        ctx: Any, rows_SI: Tensor, w_EOI: Tensor, low: Any, e_S: Tensor, alignment: int, dtype: torch.dtype
    ) -> Tensor:
        counts, starts = torch.bincount(e_S, minlength=len(w_EOI)).tolist(), [0]
        for count in counts:
            starts.append(starts[-1] + -(-count // alignment) * alignment)
        place_S = torch.cat([start + torch.arange(n) for start, n in zip(starts, counts, strict=False)])
        rows, w_EIO = rows_SI.to(dtype), w_EOI.to(dtype).mT

        def made(method: Callable[..., Tensor], values_SC: Tensor, along: str) -> Tensor:
            spread = values_SC.new_zeros(starts[-1], values_SC.shape[1])
            spread[place_S] = values_SC
            return method(spread, torch.tensor(starts), along)[place_S].double()

        ctx.made, ctx.low, ctx.rows, ctx.w, ctx.e_S = made, low, rows, w_EIO, e_S
        return by_expert(made(low.activation, rows, "row").float(), low.weight(w_EIO, "in").mT, e_S).double()

    @staticmethod
    def backward(ctx: Any, d_SO: Tensor) -> tuple[Tensor | None, ...]:
        d, low = d_SO.to(ctx.rows.dtype), ctx.low
        back = low.weight(ctx.w, "out")
        dx = by_expert(ctx.made(low.gradient, d, "row").float(), back, ctx.e_S).to(d.dtype).double()
        x, d = ctx.made(low.activation, ctx.rows, "column"), ctx.made(low.gradient, d, "column")
        dw = torch.zeros(ctx.w.shape, dtype=torch.float64).mT.index_add(0, ctx.e_S, torch.einsum("si,so->soi", x, d))
        return dx, dw, None, None, None, None
