"""A recipe at work: the three products of one weight in one call, emulated in low precision or on its hardware; and the
expert MLP's pass by them, which is in no operator.

    forward   y[segment i]  = Q(x[segment i]) Q(w[i]) + b[i]          zero behind the last segment
    dgrad     dx[segment i] = Q(dy[segment i]) Q(w[i])^T              zero behind the last segment
    wgrad     dw[i]         = Q(x[segment i])^T Q(dy[segment i])      of operands that `keep` made earlier

Q rounds each operand to the recipe's format along the axis that its product contracts.

Legend: S rows in aligned segments, e experts, A in features, B out features, C either width, N the other, M rows, K
slots per row, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from trimtab.autograd import without_autocast
from trimtab.experts import passes
from trimtab.experts.expert_ops import pass_of
from trimtab.experts.passes import Pass
from trimtab.experts.product_ops import product_gradients_op, product_op
from trimtab.experts.recipes.base import Along, Operands, Role
from trimtab.experts.recipes.hardware import Engine
from trimtab.kernels.api import Backend, put
from trimtab.kernels.choose import name_of
from trimtab.kernels.rows import expand_rows
from trimtab.layout import align_up

Kept = tuple[Tensor, ...]


class LowPrecisionProducts:
    """Of one weight in one call.

    Args:
        kernels: what multiplies where a recipe is emulated, and sums biases.
        offsets_e: [e + 1] of the rows' segments, multiples of the engine's alignment, or of the recipe's.
        call: what the recipe makes of the operands.
        engine: the recipe's own kernels; None to emulate it.
    """

    def __init__(self, kernels: Backend, offsets_e: Tensor, call: Operands, engine: Engine | None) -> None:
        self.kernels, self.name = kernels, name_of(kernels)  # which stands for them as long as they live
        self.offsets_e, self.call, self.engine = offsets_e, call, engine

    def forward(self, x_SA: Tensor, w_eAB: Tensor, bias_eB: Tensor | None = None) -> Tensor:
        """[S, B] in x's dtype."""
        y = self._product(x_SA, w_eAB, "activation", bias_eB)
        return y if bias_eB is None or self.engine is None else y + expand_rows(bias_eB, self.offsets_e, y.shape[0])

    def dgrad(self, dy_SB: Tensor, w_eAB: Tensor) -> Tensor:
        """[S, A] in dy's dtype."""
        return self._product(dy_SB, w_eAB, "gradient")

    def keep(self, rows_SC: Tensor, role: Role) -> Kept:
        """An operand of `wgrad`: encoded now, multiplied whenever it is wanted."""
        if self.engine is None:
            return (self._rows(rows_SC, role, "column"),)
        q = self.call.encode(self._filled(rows_SC), self.offsets_e, role, "column")
        return self.engine.columns(q, self.offsets_e)

    def wgrad(self, x: Kept, dy: Kept, out: Sequence[Tensor], adds: Sequence[bool], stacked: bool) -> None:
        """Into `out`, one [e, B, A] or e of [B, A]: over what it holds or, where `adds` says so, onto it."""
        if self.engine is None:
            form = f"{0 if stacked else len(out)} 0 0 "
            reads = (list(out), self.offsets_e, None, form, self.name)
            product_gradients_op(out, [True] * len(out), adds, x[0], dy[0], None, None, *reads)
            return
        dw_eBA = self.engine.wgrad((x[0], x[1]), (dy[0], dy[1]), self.offsets_e).transpose(1, 2)
        for target, value, add in zip(out, [dw_eBA] if stacked else dw_eBA.unbind(), adds, strict=True):
            put(target, value, add)

    def _product(self, rows_SC: Tensor, w_eAB: Tensor, role: Role, bias_eN: Tensor | None = None) -> Tensor:
        """Rows times w, contracted along "in" for activations, or times w^T, contracted along "out": [S, N]."""
        turned = role == "gradient"
        along: Along = "out" if turned else "in"
        if self.engine is None:
            rows, w = self._rows(rows_SC, role, "row"), self.call.weight(w_eAB, along)
            biases = [] if bias_eN is None else [bias_eN.float()]
            form = f"0 {len(biases)} {int(not turned)} "
            y: Tensor = product_op(rows, [w, *biases], self.offsets_e, None, form, self.name, False)[0]
            return y.to(rows_SC.dtype)
        q = self.call.encode(self._filled(rows_SC), self.offsets_e, role, "row")
        w_q = self.call.encode(w_eAB, None, "weight", along)
        return self.engine.rows(q, w_q, turned, self.offsets_e)[: rows_SC.shape[0]].to(rows_SC.dtype)

    def _rows(self, rows_SC: Tensor, role: Role, along: Along) -> Tensor:
        make = self.call.activation if role == "activation" else self.call.gradient
        return make(rows_SC, self.offsets_e, along)

    def _filled(self, rows_SC: Tensor) -> Tensor:
        assert self.engine is not None
        whole = align_up(max(rows_SC.shape[0], 1), self.engine.alignment)  # no kernel is called with no rows
        return pad(rows_SC, (0, 0, 0, whole - rows_SC.shape[0]))


def _pass(call: Any, reads: Sequence[Any]) -> Pass:
    """call: `mlp.Call`."""
    p = pass_of(*reads)
    p.low_precision = call.low_precision
    return p


def recipe_forward(call: Any, reads: Sequence[Any]) -> list[Tensor]:
    """As `expert_ops.experts_op`."""
    p = _pass(call, reads)
    with without_autocast():
        u = p.keep_u() if call.keep else []
        y, pre = passes.forward(p, call.keep)
    return [y] if pre is None else [y, pre, *u]


def recipe_backward(
    call: Any, dy: Tensor, kept: Sequence[Tensor], reads: Sequence[Any], need_x: bool, buffers: Any
) -> tuple[Tensor | None, Tensor, Callable[..., None]]:
    """dx, dw, and what writes the tensors' gradients into such buffers, where there are none yet. Operands are encoded
    now, also where they are multiplied later."""
    p = _pass(call, reads)
    p.u = p.placed(kept[1:])
    if buffers is None:
        p.waits = []
        p.wants(call.trained)
    else:
        p.write_to(*buffers)
    dx, dw = passes.backward(p, dy, kept[0], need_x, None)

    def write(*buffers: Any) -> None:
        p.write_to(*buffers)
        while p.waits:
            p.waits.pop(0)()

    return dx, dw, write
