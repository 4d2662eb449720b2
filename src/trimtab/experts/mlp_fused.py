"""The expert MLPs of one rank through the compiled kernels: the function of `trimtab.experts.mlp` in three calls.

Covered are the built-in activations with or without biases, weights in float32 or bfloat16 in either layout, weights
inside or in the combine, `main_grad` and delayed weight gradients. A norm behind the experts, activations with
parameters or of one's own, other dtypes and recipes go block by block: `covers` says which.

Saved for the backward: the rows, the weights and the pre-activations [R, I], gate and up as halves of a row. Experts
are worked on in waves, and what lies between two products lives as long as its wave; the gradients of the
pre-activations of all rows are kept only if the parameters' gradients come later.

Legend: M rows, K slots per row, R expert rows, e local experts, D model dim, I width of the pre-activations,
F expert hidden dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from trimtab.backward import eager_backward, needed
from trimtab.errors import InputError
from trimtab.experts.activations import GELU, Activation, ClampedSwiGLU, GeGLU, ReluSquared, SwiGLU
from trimtab.experts.expert_call import ExpertCall
from trimtab.experts.per_group import Gradients, joined
from trimtab.kernels.abi import ACTIVATIONS, TYPES
from trimtab.kernels.compiled import CompiledKernels
from trimtab.kernels.grouped import put
from trimtab.kernels.memory import in_memory, laid_out

Fields = dict[str, Any]

_WEIGHTS = ("up", "down", "up_bias", "down_bias")
"""What weight gradients do not read: FSDP2 has taken their memory back by then, and copies would wait."""


def covers(call: ExpertCall) -> bool:
    """Whether the compiled kernels compute this call."""
    if not isinstance(call.kernels, CompiledKernels) or call.products is not None:
        return False
    each = [t for t in call.weights.each if t is not None]
    dtype = call.weights.up.dtype
    plain = call.math.post_norm is None and number_of(call.math.activation) is not None
    return plain and call.dtype in TYPES and all(
        t.dtype == dtype and t.device.type == "cpu" and t.is_contiguous() and in_memory(t) for t in each
    )  # fmt: skip


def number_of(activation: Activation) -> int | None:
    """The number in cpu/call.h of an activation that has one."""
    kind = type(activation)
    if isinstance(activation, GELU | GeGLU) and kind in (GELU, GeGLU):
        tanh = "_tanh" if activation.approximate == "tanh" else ""
        return ACTIVATIONS.index(("gelu" if kind is GELU else "geglu") + tanh)
    names = {SwiGLU: "swiglu", ClampedSwiGLU: "clamped_swiglu", ReluSquared: "relu_squared"}
    return ACTIVATIONS.index(names[kind]) if kind in names else None


class FusedMLP(Function):
    """Arguments and results as those of the function in `mlp`."""

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
        kernels = _kernels(call)
        fields = _fields(call, x, w_MK, *_operands(call, up, down, up_bias, down_bias))
        pre = call.pre
        if pre is None and call.keep:
            pre = kernels.empty(fields["R"], _width(call), dtype=x.dtype)
        y = kernels.empty(*x.shape, dtype=x.dtype)
        kernels.forward({**fields, "pre": pre, "y": y})
        ctx.call = call
        ctx.save_for_backward(x, w_MK, up, down, up_bias, down_bias, *(() if call.pre is not None else (pre,)))
        return y

    @staticmethod
    @eager_backward
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: ExpertCall = ctx.call
        kernels = _kernels(call)
        x, w_MK, up, down, up_bias, down_bias, *saved = ctx.saved_tensors
        _, need_x, need_w, *needs = needed(ctx)
        fields = _fields(call, x, w_MK, *_operands(call, up, down, up_bias, down_bias))
        x, dtype = fields["x"], call.dtype
        dx = kernels.empty(*x.shape, dtype=dtype) if need_x else None
        d_w = torch.zeros(w_MK.shape, dtype=torch.float32, device="cpu")
        pre = laid_out(saved[0] if call.pre is None else call.pre, dtype, "what was saved of the forward")
        if pre.shape[0] < fields["R"] or pre.shape[1:] != (_width(call),):
            raise InputError(f"the pre-activations came back as {tuple(pre.shape)}", phase="experts")
        fields |= {"pre": pre, "dy": laid_out(dy, dtype, "the gradient")}
        grads: tuple[Tensor | None, ...] = (None, None, None, None)
        if call.defer is None:
            gradients = call.gradients(needs)
            with _targets(gradients, fields) as targets:
                kernels.backward({**fields, **targets, "dx": dx, "dw": d_w})
            grads = tuple(gradients.close())
        else:
            fields["d_pre"] = kernels.empty(fields["R"], _width(call), dtype=x.dtype)
            kernels.backward({**fields, "dx": dx, "dw": d_w})

            late = {name: value for name, value in fields.items() if name not in _WEIGHTS}

            def job() -> tuple[list[Tensor], list[Tensor]]:
                gradients = call.gradients(())
                with _targets(gradients, late) as targets:
                    kernels.weight_gradients({**late, **targets})
                return gradients.deliver()

            call.defer(job, call.delayed_reads(fields["x"], fields["dy"], fields["w"]))
        return (None, dx, d_w.to(w_MK.dtype) if need_w else None, *grads, None)


def _kernels(call: ExpertCall) -> CompiledKernels:
    assert isinstance(call.kernels, CompiledKernels)
    return call.kernels


def _width(call: ExpertCall) -> int:
    return call.weights.width


def _operands(
    call: ExpertCall, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The parameters as the kernels read them: beside rows in bfloat16 they round a weight in float32 themselves."""
    if (up.dtype, call.dtype) == (torch.float32, torch.bfloat16):
        return joined(up), down, None if up_bias is None else up_bias.flatten(1), down_bias
    return call.cast(up, down, up_bias, down_bias)


def _fields(
    call: ExpertCall, x: Tensor, w_MK: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Fields:  # fmt: skip
    """What all three calls read, and what keeps it alive."""
    plan, math, dtype = call.plan, call.math, call.dtype
    activation = math.activation
    _check(call, x, w_MK, up, down, up_bias, down_bias)
    up, down = laid_out(up, up.dtype, "up"), laid_out(down, up.dtype, "down")
    up_bias, down_bias = (b if b is None else laid_out(b, dtype, "a bias") for b in (up_bias, down_bias))
    shape = {
        "alpha": activation.alpha, "limit": activation.limit, "shift": activation.shift,
        "interleaved": int(activation.interleaved),
    } if isinstance(activation, ClampedSwiGLU) else {}  # fmt: skip
    return shape | {
        "type": TYPES[dtype], "type_weights": TYPES[up.dtype], "act": number_of(activation), "folded": int(math.folded),
        "transposed": int(call.weights.transposed),
        "M": x.shape[0], "R": plan.row_R.shape[0], "E": up.shape[0], "D": x.shape[1],
        "F": down.shape[1 if call.weights.transposed else 2],
        "row_R": plan.row_R.contiguous(), "slot_R": plan.slot_R.contiguous(), "offsets": plan.offsets_e.contiguous(),
        "w": laid_out(w_MK, torch.float32, "the routing weights"), "x": laid_out(x, dtype, "x"), "up": up, "down": down,
        "up_bias": up_bias, "down_bias": down_bias,
    }  # fmt: skip


def _check(
    call: ExpertCall, x: Tensor, w_MK: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> None:  # fmt: skip
    """The kernels read and write what these shapes say."""
    axis = 1 if call.weights.transposed else 2
    experts, dim, hidden, width = up.shape[0], x.shape[1], down.shape[axis], _width(call)
    legal = width == (2 * hidden if getattr(call.math.activation, "gated", False) else hidden)
    legal &= up.shape[axis] == dim and down.shape == (experts, *((hidden, dim) if axis == 1 else (dim, hidden)))
    legal &= all(bias is None or bias.shape == (experts, n) for bias, n in ((up_bias, width), (down_bias, dim)))
    legal &= w_MK.shape == (x.shape[0], call.plan.top_k) and call.plan.counts_e.shape[0] == experts
    legal &= call.plan.row_csr.indptr.shape[0] == x.shape[0] + 1
    if not legal:
        biases = [None if bias is None else tuple(bias.shape) for bias in (up_bias, down_bias)]
        raise InputError(
            f"x {tuple(x.shape)}, weights {tuple(w_MK.shape)}, up {tuple(up.shape)}, down {tuple(down.shape)} and "
            f"biases {biases} do not fit together",
            phase="experts",
        )


@contextmanager
def _targets(grads: Any, fields: Fields) -> Iterator[Fields]:
    """Where the kernels write the gradients that are wanted. What they cannot write is made beside it and put there."""
    later: list[tuple[Tensor, Tensor, bool]] = []
    targets: Fields = {}
    with ExitStack() as stack:
        for name in ("up", "down", "up_bias", "down_bias"):
            into: Gradients | None = getattr(grads, name)
            if into is None:
                continue
            buffer, add = stack.enter_context(into.block(slice(0, fields["E"])))
            bias = name.endswith("bias")
            if bias or buffer.dtype not in TYPES or not buffer.is_contiguous():
                beside = torch.empty(buffer.shape, dtype=torch.float32, device="cpu")
                later.append((buffer, beside, add))
                buffer, add = beside, False
            targets |= {f"d_{name}": buffer}
            if not bias:
                targets |= {f"type_{name}": TYPES[buffer.dtype], f"add_{name}": int(add)}
        yield targets
        for target, value, adds in later:
            put(target, value, adds)
