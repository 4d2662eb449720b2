"""The expert MLPs of one rank, differentiable: y = sum over a row's experts of w * down(activation(up(x))).

Saved for the backward: the rows, the routing weights, the pre-activations [R, I], and `Product.u`. Gathered rows and
activations are computed again. A function of one's own between the products, or a norm behind them, keeps its rows: it
runs under autograd, between two products that are functions of their own.

Legend: M rows, K slots per row, R expert rows, e local experts, D model dim, I width of the pre-activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trimtab.autograd import forward_of, functions_of, needed
from trimtab.errors import ConfigError
from trimtab.experts.expert_ops import experts_backward_op, experts_gradients_op, experts_op
from trimtab.experts.plan import ExpertPlan
from trimtab.experts.weight import GroupedWeight
from trimtab.experts.weight_grad import ORDINARY, Gradients, GradSink, handed, kinds_of
from trimtab.kernels.api import Backend
from trimtab.kernels.choose import name_of

if TYPE_CHECKING:
    from trimtab.experts.low_precision import LowPrecisionProducts

RowFunction = Callable[[Tensor], Tensor]
"""Row by row, differentiable, for any number of rows including none."""


def expert_mlp(
    x_MD: Tensor, w_MK: Tensor, plan: ExpertPlan, up: GroupedWeight, down: GroupedWeight,
    activation: str | RowFunction = "swiglu", kernels: Backend | str = "auto", *, norm: RowFunction | None = None,
    sink: GradSink = ORDINARY, low_precision: tuple[LowPrecisionProducts, LowPrecisionProducts] | None = None,
) -> Tensor:  # fmt: skip
    """Weighted sum of each row's local experts: [M, D] in x's dtype. Local: no rank waits for another.

    Args:
        x_MD: rows; computed in the parameters' dtype, or in autocast's, see `trimtab.autograd.computed_in`.
        w_MK: routing weights of the slots that `plan` was built from; those of dropped slots are not read.
        up, down: the weights; where each is of all experts, up is [e, 2, F, D] with a gate (gate 0, up 1) or [e, I, D],
            and down [e, D, F]; with `transposed` [e, D, I] and [e, F, D].
        activation: a word of `activations.activation_of`, or a function [R, I] -> [R, F] of one's own.
        kernels: those of a `KernelChoice`, or their names joined by commas, which `torch.compile` can trace.
        norm: a function [R, D] -> [R, D] behind the experts, before their outputs are weighted.
        sink: where the parameters' gradients go. With `defer` the gradients of the pre-activations and of the result
            are kept until its work is done, and nobody is told of parameters' gradients before.
        low_precision: a recipe's products with up and with down, made for this call; the plan's segments are aligned
            for it.

    Every parameter gets a gradient of its full shape, zeros where no token came. Differentiating twice raises.

    Raises:
        ConfigError: a recipe, or a format of their own, with `transposed`; up and down of different numbers of experts.
    """
    if (up.transposed or down.transposed) and (low_precision is not None or up.format or down.format):
        raise ConfigError("a recipe takes no transposed weights, and those of a format of their own lie [e, out, in]")
    apart = max(len(up.values), len(down.values)) > 1
    if up.groups != down.groups or (apart and any(len(of.values) > 1 and of.stacked for of in (up, down))):
        raise ConfigError("up and down: one tensor of all experts, or one [out, in] of each", phase="experts")
    dtype = up.computed_in
    w = w_MK if w_MK.dtype is torch.float32 else w_MK.to(torch.promote_types(w_MK.dtype, torch.float32))
    if callable(activation) or norm is not None:
        from trimtab.experts.grouped_product import by_products

        y: Tensor = by_products(x_MD.to(dtype), w, plan, up, down, activation, norm, kernels, sink, low_precision)
        return y if y.dtype is x_MD.dtype else y.to(x_MD.dtype)
    seed = None
    if up.lora is not None or down.lora is not None:
        from trimtab.experts.lora import filled, seed_of

        up, down, seed = filled(up), filled(down), seed_of(up, down)
    of_up, of_down = up.tensors(), down.tensors()
    tensors = of_up + of_down
    call = Call(
        plan, activation, None if isinstance(kernels, str) else kernels,
        kernels if isinstance(kernels, str) else name_of(kernels), up.form, down.form, len(of_up), len(tensors),
        seed, torch.is_grad_enabled(), sink, low_precision,
    )  # fmt: skip
    x = x_MD if x_MD.dtype is dtype else x_MD.to(dtype)
    inputs: Sequence[Tensor] = tensors
    if not sink.ordinary:
        call.owned, call.trained = tensors, [t.requires_grad for t in tensors]
        inputs = handed(tensors, sink, x_MD)
    y = forward_of(_Experts if sink.ordinary and low_precision is None else _ExpertsWithState, call, x, w, *inputs)
    return y if y.dtype is x_MD.dtype else y.to(x_MD.dtype)


@dataclass(slots=True, eq=False)
class Call:
    """What is not differentiated.

    word: names the activation. name: of the kernels, in operators. up_form, down_form: see `GroupedWeight.form`.
    first, count: how many tensors up has, and both have. keep: whether a backward may come.
    owned: with `sink.main_grad` or `sink.defer` the tensors themselves; else autograd's saved ones are all that lives,
        which a checkpoint may free. trained: which of these wanted a gradient when the call was made.
    """

    plan: ExpertPlan
    word: str
    kernels: Backend | None
    name: str
    up_form: str
    down_form: str
    first: int
    count: int
    seed: Tensor | None
    keep: bool
    sink: GradSink
    low_precision: tuple[LowPrecisionProducts, LowPrecisionProducts] | None
    owned: Sequence[Tensor] | None = None
    trained: Sequence[bool] = ()

    def reads(self, x: Tensor, w: Tensor, tensors: Sequence[Tensor], plan: Sequence[Tensor], seed: Any) -> list[Any]:
        """As the operators take them."""
        up, down = list(tensors[: self.first]), list(tensors[self.first : self.count])
        return [x, w, up, down, list(plan), seed, self.word, self.up_form, self.down_form, self.name]

    def gradients(self, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> Gradients:
        """Of those that are wanted."""
        kinds = [*kinds_of(self.up_form, "up"), *kinds_of(self.down_form, "down")]
        empty_like = torch.empty_like if self.kernels is None else self.kernels.empty_like
        return Gradients(tensors, kinds, wanted, self.sink.main_grad, empty_like)


def _forward(ctx: Any, *given: Any) -> Tensor:
    """given: the call, x, w_MK and the tensors. By one name: Dynamo takes a forward of as many names as it is given
    arguments for one without a context."""
    call, x, w_MK, *tensors = given
    y: Tensor
    if call.low_precision is None:
        y, *kept = experts_op(*call.reads(x, w_MK, tensors, call.plan, call.seed), call.keep)
    else:
        from trimtab.experts.low_precision import recipe_forward

        y, *kept = recipe_forward(call, call.reads(x, w_MK, tensors, call.plan, call.seed))
    ctx.call = call
    ctx.save_for_backward(x, w_MK, call.seed, *call.plan, *tensors[: call.count], *kept)
    return y


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    call: Call = ctx.call
    x, w_MK, seed, *rest = ctx.saved_tensors
    places = len(call.plan)
    plan, tensors, kept = rest[:places], rest[places : places + call.count], rest[places + call.count :]
    _, need_x, need_w, *needs = needed(ctx)
    defer, owned, reads = call.sink.defer, call.owned or tensors, call.reads(x, w_MK, tensors, plan, seed)
    found: Sequence[Tensor | None] = [None] * len(needs)
    grads = call.gradients(owned, needs) if defer is None else None
    if call.low_precision is not None:
        from trimtab.experts.low_precision import recipe_backward

        dx, dw, write = recipe_backward(call, dy, kept, reads, need_x, None if grads is None else grads.buffers())
    elif grads is not None:
        dx, dw, _ = experts_backward_op(dy, kept, *grads.buffers(), *reads, need_x, False)
    else:
        v = [torch.empty_like(u) for u in kept[1:]]
        dx, dw, d_pre = experts_backward_op(dy, kept, v, [False] * call.count, [], *reads, need_x, True)
        write = lambda *buffers: experts_gradients_op(dy, [*kept, d_pre, *v], *buffers, *reads)  # noqa: E731
    if grads is not None:
        found = grads.close()
    elif defer is not None:

        def job() -> list[tuple[Tensor, Tensor]]:
            grads = call.gradients(owned, call.trained)
            write(*grads.buffers())
            return grads.deliver()

        of_up, of_down = any(call.trained[: call.first]), any(call.trained[call.first :])
        defer(job, [x] * of_up + [dy, w_MK] * of_down if call.low_precision is None else ())  # a recipe has its own
    return (None, dx if need_x else None, dw if need_w else None, *found)


_Experts, _ExpertsWithState = functions_of("_Experts", _forward, _backward)
