"""The expert MLP with adapters or codes as operators of `torch.library`; see `trimtab.experts.ops`.

    trimtab::adapted_experts             y, pre, u_up, u_down    from x, the routing weights, parameters and pairs
    trimtab::adapted_experts_backward    dx, dw, the pairs' gradients, and the parameters' where they are wanted

pairs: a [e, r, D] and b [e, I, r] of up, a [e, r, F] and b [e, D, r] of down; r = 0 where there is none. They may be
wider than the rows, and then so are their gradients.
code_scales: of up and of down, whose codes they are in `format`; "" where there are weights.

Legend: M rows, R expert rows, e local experts, D model dim, I width of the pre-activations, F expert hidden dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from trimtab.autograd import without_autocast
from trimtab.experts.operands import Operands, Targets, Thin
from trimtab.experts.ops import OPTIONS, READS, WRITES, backend_of, flops_of, operands_of
from trimtab.experts.quantized import Codes, packed
from trimtab.kernels.api import Backend
from trimtab.kernels.choose import kernels_of
from trimtab.kernels.compiled import CompiledKernels
from trimtab.operators import operator

_PAIRS = "Tensor[] pairs, float[] scales, Tensor[] code_scales, str format"


def _operands(
    reads: Sequence[Any], pairs: Sequence[Tensor], scales: Sequence[float], code_scales: Sequence[Tensor], form: str,
    u: Sequence[Tensor | None], made: Sequence[Tensor | None],
) -> Operands:  # fmt: skip
    up, down = (Thin(pairs[i], pairs[i + 1], scales[i // 2], u[i // 2], made[i], made[i + 1]) for i in (0, 2))
    codes = Codes(format=form, up=code_scales[0], down=code_scales[1], dtype=reads[0].dtype) if form else None
    return replace(operands_of(*reads), thin=(up, down), codes=codes)


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *reads, pairs, scales, code_scales, form, keep = args
    x, plan = reads[0], reads[6]
    u = [x.new_empty(plan[0].shape[0] if keep else 0, pairs[i].shape[1]) for i in (0, 2)]
    o = _operands(reads, pairs, scales, code_scales, form, u if keep else (None, None), [None] * 4)
    with without_autocast():
        y, pre = backend_of(o).forward(o, keep)
    return y, pre, u[0], u[1]


def _forward_fake(x: Tensor, w: Tensor, up: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan, pairs, keep = rest[3], rest[7], rest[-1]
    rows = plan[0].shape[0] if keep else 0
    u = [x.new_empty(rows, pairs[i].shape[1]) for i in (0, 2)]
    return x.new_empty(x.shape), x.new_empty(rows, pairs[1].shape[1]), u[0], u[1]


def _backward(
    dy: Tensor, pre: Tensor, u_up: Tensor, u_down: Tensor, out: Any, wanted: Any, adds: Any, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    *reads, pairs, scales, code_scales, form, need_x, trained = args
    kernels = kernels_of(reads[9], dy.device, reads[0].dtype)
    made = _gradients(pairs, reads[0].dtype, trained, kernels)
    o = _operands(reads, pairs, scales, code_scales, form, (u_up, u_down), made if trained else [None] * 4)
    with without_autocast():
        dx, dw = backend_of(o).backward(o, dy, pre, Targets.of(out, wanted, adds), need_x, None)
    return o.x.new_empty(0) if dx is None else dx, dw, made[0], made[1], made[2], made[3]


def _backward_fake(
    dy: Tensor, pre: Tensor, u_up: Tensor, u_down: Tensor, out: Any, wanted: Any, adds: Any, x: Tensor, w: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    *_, pairs, _, _, _, need_x, trained = rest
    made = _gradients(pairs, x.dtype, trained)
    return x.new_empty(x.shape if need_x else 0), w.new_empty(w.shape), made[0], made[1], made[2], made[3]


def _gradients(
    pairs: Sequence[Tensor], dtype: torch.dtype, trained: bool, kernels: Backend | None = None
) -> list[Tensor]:
    wide = torch.promote_types(dtype, torch.float32)
    if isinstance(kernels, CompiledKernels) and trained:
        return [kernels.empty(*pair.shape, dtype=wide) for pair in pairs]
    return [pair.new_empty(pair.shape if trained else 0, dtype=wide) for pair in pairs]


def _thin_flops(pairs: Sequence[Sequence[int]], plan: Sequence[Sequence[int]], products: int) -> int:
    return int(2 * plan[0][0] * sum(prod(pair[1:]) for pair in pairs) * products)


def _forward_flops(*shapes: Any, **kwargs: Any) -> int:
    _, _, up, down, _, _, plan, _, _, _, pairs, _, _, form, _ = shapes
    return flops_of(up, down, plan, 1, 1) * packed(form) + _thin_flops(pairs, plan, 1)


def _backward_flops(*shapes: Any, **kwargs: Any) -> int:
    _, _, _, _, _, wanted, _, _, _, up, down, _, _, plan, _, _, _, pairs, _, _, form, need_x, trained = shapes
    own = flops_of(up, down, plan, need_x + wanted[0], 1 + wanted[1]) * packed(form)
    return own + _thin_flops(pairs, plan, 1 + int(trained))


adapted_op = operator(
    f"adapted_experts({READS}, {OPTIONS}, {_PAIRS}, bool keep) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    _forward_flops,
)
"""y [M, D]; the pre-activations [R, I] and, for each pair, scale x a^T [R, r]: no rows of these unless `keep`."""

adapted_backward_op = operator(
    f"adapted_experts_backward(Tensor dy, Tensor pre, Tensor u_up, Tensor u_down, {WRITES}, {READS}, {OPTIONS}, "
    f"{_PAIRS}, bool need_x, bool trained) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    _backward_flops,
)
"""dx, empty unless `need_x`; dw; and the gradients of the pairs in float32 or wider, empty unless `trained`."""
