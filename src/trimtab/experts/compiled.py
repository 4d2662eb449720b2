"""`ExpertMLP` inside a graph of `torch.compile`: one operator forward, one backward, around the eager functions.

    y, pre = trimtab::expert_mlp(x, w, ids, up, down, biases)              as in eager mode, no segment filled up
    dx, dw, dup, ddown, … = trimtab::expert_mlp_backward(dy, …, pre)       as in eager mode

How many slots an expert gets stays inside: the graph sees `pre` with as many rows as there are slots, N, of which the
first R are used and the others are zeros. So no shape depends on data, whatever R is, and 0 is one value of N.

Imported while a graph is traced and at no other time: importing it defines the operators and loads the compiler.
Nothing that runs eagerly sees either.

Legend: M rows, K slots per row, N slots, R kept slots, e local experts, D model dim, F expert hidden dim, I width of
the pre-activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from trimtab.autocast import computed_in, without_autocast
from trimtab.backward import Context, may_have_tangents
from trimtab.eager import eagerly
from trimtab.experts.activations import spelled
from trimtab.experts.expert_call import ExpertCall, ExpertMath, ExpertWeights
from trimtab.experts.mlp import function_of
from trimtab.experts.plan import plan_experts
from trimtab.kernels.apart import apart
from trimtab.kernels.grouped import Kernels
from trimtab.kernels.selftest import KernelChoice

if TYPE_CHECKING:
    from trimtab.experts.module import ExpertMLP


def compiled_experts(
    module: ExpertMLP, x_MD: Tensor, ids_MK: Tensor, w_MK: Tensor, num_slots: int | None = None
) -> Tensor:
    """`module.forward` while a graph is traced.

    Weight gradients into `main_grad` or later, recipes, and kernels that have no name have state that a graph does
    not see: such a module runs eagerly between two graphs. So does any where values may have tangents.

    Raises:
        InputError: see `may_have_tangents`.
    """
    plain = module.main_grad == "off" and not module.delay_wgrad and module.recipe is None
    if not plain or not operable(module.kernels):
        y: Tensor = eagerly(module.forward, x_MD, ids_MK, w_MK, num_slots=num_slots)
        return y
    return as_operator(
        x_MD, ids_MK, w_MK, module.expert_weights(), module.activation, module.weights, module.kernels, num_slots
    )


def operable(kernels: KernelChoice) -> bool:
    """Whether an operator may be in their place here, and can be told of them: none are of one's own.

    Raises:
        InputError: see `may_have_tangents`.
    """
    return not may_have_tangents() and all(isinstance(name, str) for name in kernels.candidates)


def as_operator(
    x_MD: Tensor, ids_MK: Tensor, w_MK: Tensor, weights: ExpertWeights, activation: str, side: str,
    kernels: KernelChoice, num_slots: int | None,
) -> Tensor:  # fmt: skip
    """One call of `expert_mlp_op`, in x's dtype. activation, side: as there. kernels: `operable`."""
    x, w = x_MD.to(computed_in(weights.up)), w_MK.to(torch.promote_types(w_MK.dtype, torch.float32))
    out, _ = expert_mlp_op(
        x, w, ids_MK, *weights.each, activation, side, weights.transposed, ",".join(map(str, kernels.candidates)),
        num_slots, torch.is_grad_enabled(),
    )  # fmt: skip
    return cast(Tensor, out).to(x_MD.dtype)


@lru_cache(maxsize=64)
def _kernels(names: str, device: torch.device, dtype: torch.dtype, shape: tuple[int, int] | None) -> Kernels:
    """Chosen and tested once for all layers that ask for the same: names, device, dtype and, on CUDA, (D, F).

    The one cache of the process, for an operator is handed tensors, numbers and strings: no layer's own `KernelChoice`
    reaches it, and layers that share a graph share what it is handed. A test takes milliseconds, on a GPU seconds, and
    must not lie in a capture, so it cannot come with every call. What is kept is the kernels, and their idle pages.

    In a thread of its own: an operator runs where nothing is recorded for a backward, and a self-test may need one.
    """
    first, *others = names.split(",")
    return apart(device, lambda: KernelChoice(first, fallback=others).on(device, dtype, shape))


def _kernels_for(names: str, weights: ExpertWeights, dtype: torch.dtype) -> Kernels:
    shape = weights.shape if weights.up.is_cuda else None
    return _kernels(names, weights.up.device, dtype, shape)


def _call(
    x: Tensor, ids: Tensor, weights: ExpertWeights, activation: str, side: str, kernels: str, num_slots: int | None,
    keep: bool, pre: Tensor | None,
) -> ExpertCall:  # fmt: skip
    chosen = _kernels_for(kernels, weights, x.dtype)
    return ExpertCall(
        plan=plan_experts(ids, weights.up.shape[0], num_slots=num_slots, kernels=chosen),
        math=ExpertMath(activation=spelled(activation), weights=cast(Literal["experts", "combine"], side)),
        kernels=chosen,
        weights=weights, dtype=x.dtype, main_grad="off", keep=keep, pre=pre,
    )  # fmt: skip


def _pre_rows(ids: Tensor, num_slots: int | None, keep: bool) -> int:
    return 0 if not keep else ids.numel() if num_slots is None else num_slots


@torch.library.custom_op("trimtab::expert_mlp", mutates_args=())
def expert_mlp_op(
    x: Tensor, w: Tensor, ids: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
    activation: str, side: str, transposed: bool, kernels: str, num_slots: int | None, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y [M, D] and the pre-activations [N, I], [0, I] unless `keep`.

    Args:
        x, w, ids: [M, D], [M, K], [M, K] as `ExpertMLP.forward` takes them, x in the dtype to compute in: the
            parameters', or autocast's.
        up, down, up_bias, down_bias: as in `ExpertMLP`; with `transposed` as in `ExpertWeights`.
        activation: a word of `activations.spelled`. side: `weights` of `ExpertMLP`.
        kernels: names, the first one chosen and the others its fallback.
        num_slots: N, if not M * K.
        keep: whether a backward may come.
    """
    weights = ExpertWeights(up=up, down=down, up_bias=up_bias, down_bias=down_bias, transposed=transposed)
    pre = x.new_empty(_pre_rows(ids, num_slots, keep), weights.width)
    call = _call(x, ids, weights, activation, side, kernels, num_slots, keep, pre if keep else None)
    pre[call.plan.row_R.shape[0] :] = 0
    with torch.no_grad(), without_autocast():
        y = function_of(call).forward(Context(), call, x, w, *weights.each, None)
    return y, pre


@expert_mlp_op.register_fake
def _(
    x: Tensor, w: Tensor, ids: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
    activation: str, side: str, transposed: bool, kernels: str, num_slots: int | None, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows = _pre_rows(ids, num_slots, keep)
    weights = ExpertWeights(up=up, down=down, transposed=transposed)
    return x.new_empty(x.shape[0], weights.shape[0]), x.new_empty(rows, weights.width)


@torch.library.custom_op("trimtab::expert_mlp_backward", mutates_args=())
def expert_mlp_backward_op(
    dy: Tensor, pre: Tensor, x: Tensor, w: Tensor, ids: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str, side: str, transposed: bool, kernels: str, num_slots: int | None,
    needs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """The gradients that are wanted, of x, w, up, down, up_bias and down_bias, in this order.

    needs: for each of them, whether it is. The rest as in `expert_mlp_op`.
    """
    weights = ExpertWeights(up=up, down=down, up_bias=up_bias, down_bias=down_bias, transposed=transposed)
    call = _call(x, ids, weights, activation, side, kernels, num_slots, True, pre)
    parts = [pre[block.rows] for block in call.blocks()]
    context = Context((x, w, *weights.each, *parts), (False, *needs, False))
    context.call = call
    with torch.no_grad():
        grads = function_of(call).backward(context, dy.contiguous())[1:7]
    return [grad for grad, needed in zip(grads, needs, strict=True) if needed]


@expert_mlp_backward_op.register_fake
def _(
    dy: Tensor, pre: Tensor, x: Tensor, w: Tensor, ids: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str, side: str, transposed: bool, kernels: str, num_slots: int | None,
    needs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    each = (x, w, up, down, up_bias, down_bias)
    return [t.new_empty(t.shape) for t, needed in zip(each, needs, strict=True) if needed and t is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, activation, side, transposed, kernels, num_slots, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], *tensors)
    ctx.options = activation, side, transposed, kernels, num_slots


def _backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    pre, x, w, ids, *params = ctx.saved_tensors
    need_x, need_w, _, *need_params = ctx.needs_input_grad[:7]
    needs = [need_x, need_w, *need_params]
    if dy is None:
        return (None,) * len(ctx.needs_input_grad)
    found = iter(expert_mlp_backward_op(dy, pre, x, w, ids, *params, *ctx.options, needs))
    dx, dw, *d_params = [next(found) if needed else None for needed in needs]
    return (dx, dw, None, *d_params, *(None for _ in range(6)))


expert_mlp_op.register_autograd(_backward, setup_context=_save)
