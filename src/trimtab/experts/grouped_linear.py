"""The grouped linear map as a function: differentiable, its weight gradients wherever they are to go.

Legend: S rows in segments, e groups, A in features, B out features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from trimtab.autograd import eager_backward, forward_of, needed, once_differentiable, without_autocast
from trimtab.experts.grouped_ops import by_row, grouped_linear_op, grouped_sum_op, weight_gradient_op
from trimtab.experts.weight_grad import Defer, MainGradMode, WeightGradient, anchor
from trimtab.kernels.api import Backend
from trimtab.kernels.choose import name_of

if TYPE_CHECKING:
    from trimtab.experts.low_precision import LowPrecisionProducts


def grouped_linear(
    x_SA: Tensor,
    weight: Tensor,
    offsets_e: Tensor,
    bias: Tensor | None = None,
    *,
    transposed: bool = False,
    kernels: Backend | str = "auto",
) -> Tensor:
    """x W_i^T + b_i, i the group of the row: [S, B] in the weight's dtype. Differentiable in x, weight and bias, once.

    Every gradient has its tensor's full shape, zeros for a group without rows. Rows from offsets_e[-1] on may hold
    anything: their output is zero and so is their gradient. S may be 0. Autocast is not heeded.

    Args:
        x_SA: rows, the groups' one after the other, in the weight's dtype.
        weight: [e, B, A]; with `transposed` [e, A, B].
        offsets_e: [e + 1] int64 on x's device, the start of each group's segment and the end of the last. Not read on
            the host but by kernels that run on the CPU, and by torch for other dtypes than bfloat16.
        bias: [e, B], in the weight's dtype.
        transposed: how the weight lies.
        kernels: those of a `KernelChoice`, or their names joined by commas, which `torch.compile` can trace.
    """
    biases = () if bias is None else (bias,)
    return linear_of(x_SA, (weight,), biases, offsets_e, stacked=True, transposed=transposed, kernels=kernels)


def linear_of(
    x_SA: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    offsets_e: Tensor,
    *,
    stacked: bool,
    kernels: Backend | str,
    transposed: bool = False,
    main_grad: MainGradMode = "off",
    defer: Defer | None = None,
    low: LowPrecisionProducts | None = None,
) -> Tensor:
    """`grouped_linear` in x's dtype, whatever the parameters': gradients are in their own.

    Args:
        weights, biases: one of each and all groups' where `stacked`, else one per group; no biases at all are fine.
        main_grad: where the weights' gradients go, see `trimtab.experts.weight_grad`; biases have ordinary ones.
        defer: takes the work of the parameters' gradients at each backward.
        low: a recipe's products; `offsets_e` are theirs.
    """
    params = (*weights, *biases)
    call = LinearCall(
        params=params, number=len(params), count=len(weights), stacked=stacked, transposed=transposed, kernels=kernels,
        name=kernels if isinstance(kernels, str) else name_of(kernels), main_grad=main_grad, defer=defer, low=low,
        trained=tuple(p.requires_grad for p in params), keep=torch.is_grad_enabled(),
    )  # fmt: skip
    if defer is not None:
        params = (*(p.detach() for p in params), anchor(x_SA, any(call.trained)))
    kind: type[Function] = _WithState
    if main_grad == "off" and defer is None and low is None:
        kind, call.params = _GroupedLinear, ()  # what autograd saves says enough, and a checkpoint may free it
    with without_autocast():
        y: Tensor = forward_of(kind, call, x_SA.contiguous(), None if low else offsets_e, *params)
    return y


@dataclass(kw_only=True)
class LinearCall:
    """What is not differentiated.

    params: weights, then biases, themselves: their attributes say where gradients go, if they go anywhere else than to
        autograd. number: of all. count: of the weights.
    name: of the kernels in operators; it stands for them as long as they live. keep: whether a backward may come.
    trained: which parameters wanted a gradient when the call was made; later they may not say so.
    """

    params: tuple[Tensor, ...]
    number: int
    count: int
    stacked: bool
    transposed: bool
    kernels: Backend | str
    name: str
    main_grad: MainGradMode
    defer: Defer | None
    low: LowPrecisionProducts | None
    trained: tuple[bool, ...]
    keep: bool

    def cast(self, params: Sequence[Tensor], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and biases as autograd gives them, in the dtype that is multiplied in."""
        cast = [p if p.dtype == dtype else p.to(dtype) for p in params]
        return cast[: self.count], cast[self.count : self.number]


def _forward(ctx: Any, call: LinearCall, x_SA: Tensor, offsets_e: Tensor | None, *params: Tensor) -> Tensor:
    """What is saved is the parameters, not their copies in x's dtype: others may want the memory (FSDP2)."""
    weights, biases = call.cast(params, x_SA.dtype)
    keep, low = call.keep and any(call.trained[: call.count]), call.low
    kept: tuple[Tensor, ...] = (x_SA,)
    y: Tensor
    if low is None:
        y = grouped_linear_op(x_SA, weights, biases, offsets_e, call.stacked, call.transposed, call.name)
    else:
        bias = None if not biases else biases[0] if call.stacked else torch.stack(biases)
        y = low.forward(x_SA, by_row(weights, slice(None), call.stacked, False), bias)
        kept = low.keep(x_SA, "activation") if keep else ()
    ctx.call = call
    ctx.save_for_backward(offsets_e, *params, *(kept if keep else ()))
    return y


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    call: LinearCall = ctx.call
    _, need_x, _, *needs = needed(ctx)
    offsets_e, *saved = ctx.saved_tensors
    params, kept = saved[: len(needs)], saved[len(needs) :]
    wanted = needs if call.defer is None else call.trained
    low, dy_SB, dx = call.low, dy.contiguous(), None
    columns: tuple[Tensor, ...] = ()
    if need_x:
        weights, _ = call.cast(params, dy.dtype)
        if low is None:
            dx = grouped_linear_op(dy_SB, weights, [], offsets_e, call.stacked, not call.transposed, call.name)
        else:
            dx = low.dgrad(dy_SB, by_row(weights, slice(None), call.stacked, False))
    if any(wanted[: call.count]):  # quantized now, also where the product comes later: scales belong to this step
        columns = (dy_SB,) if low is None else low.keep(dy_SB, "gradient")

    def gradients() -> list[Tensor | None]:
        return _parameter_gradients(call, call.params or params, wanted, offsets_e, kept, columns, dy_SB)

    if call.defer is None:
        return None, dx, None, *gradients()

    def job() -> list[tuple[Tensor, Tensor]]:
        pairs = zip(call.params, gradients(), strict=True)
        return [(param, gradient) for param, gradient in pairs if gradient is not None]

    call.defer(job, [*kept, *columns, *([dy_SB] if any(wanted[call.count :]) else [])])
    return None, dx, None, *(None for _ in params)


def _parameter_gradients(
    call: LinearCall, params: Sequence[Tensor], wanted: Sequence[bool], offsets_e: Tensor | None,
    kept: Sequence[Tensor], columns: tuple[Tensor, ...], dy_SB: Tensor,
) -> list[Tensor | None]:  # fmt: skip
    """What autograd gets for each weight and each bias, None for those that want nothing."""
    n, low = call.count, call.low
    found: list[Tensor | None] = [None] * call.number
    if any(wanted[:n]):
        modes = [call.main_grad if want else "off" for want in wanted[:n]]
        names = ["weight"] if call.stacked else [f"weight{i}" for i in range(n)]
        each = [WeightGradient(*one) for one in zip(params, modes, names, strict=False)]
        out, adds = [gradient.buffer for gradient in each], [gradient.adds for gradient in each]
        if low is None:
            weight_gradient_op(out, adds, kept[0], columns[0], offsets_e, call.stacked, call.transposed, call.name)
        else:
            low.wgrad(tuple(kept), columns, out, adds, call.stacked)
        found[:n] = [None if gradient.silent else gradient.close() for gradient in each]
    if any(wanted[n:]):
        db_eB = grouped_sum_op(dy_SB, low.offsets_e if low else offsets_e, params[-1].dtype, call.name)
        found[n:] = [db_eB] if call.stacked else [db_B.clone() for db_B in db_eB.unbind()]
    return [gradient if want else None for gradient, want in zip(found, wanted, strict=True)]


class _GroupedLinear(Function):
    """In graphs of `torch.compile` as well."""

    forward = staticmethod(_forward)
    backward = staticmethod(once_differentiable(_backward))


class _WithState(Function):
    """With what a graph does not see: `main_grad`, delayed gradients, a recipe."""

    forward = staticmethod(_forward)
    backward = staticmethod(eager_backward(_backward))
