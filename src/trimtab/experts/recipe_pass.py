"""The expert MLP's pass by a recipe's products, which are in no operator.

Legend: M rows, K slots per row, D model dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from trimtab.autograd import without_autocast
from trimtab.experts.backends import run_forward
from trimtab.experts.mlp_pass import Pass
from trimtab.experts.passes import backward
from trimtab.experts.plan import ExpertPlan
from trimtab.experts.weight import GroupedWeight


def pass_of(
    call: Any, x: Tensor, w: Tensor, tensors: Sequence[Tensor], plan: Sequence[Tensor], seed: Tensor | None
) -> Pass:
    """From what autograd saved. call: `mlp.Call`."""
    assert call.kernels is not None
    up = GroupedWeight.of(tensors[: call.first], call.up_form)
    down = GroupedWeight.of(tensors[call.first : call.count], call.down_form)
    return Pass(x, w, up, down, call.word, ExpertPlan(*plan), call.kernels, seed, call.low_precision)


def recipe_forward(call: Any, x: Tensor, w: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """As `backends.run_forward`."""
    with without_autocast():
        return run_forward(pass_of(call, x, w, tensors, call.plan, call.seed), call.keep)


def recipe_backward(
    call: Any, dy: Tensor, kept: Sequence[Tensor], reads: tuple[Any, ...], needs: Sequence[bool], need_x: bool
) -> tuple[Tensor | None, Tensor, Sequence[Tensor | None]]:
    """dx, dw, and what autograd gets for each tensor. Operands are quantized now, also where they are multiplied later.

    reads: what `pass_of` takes.
    """
    p, (_, _, tensors, *_) = pass_of(call, *reads), reads
    defer, owned, p.u = call.sink.defer, call.owned or tensors, p.placed(kept[1:])
    if defer is None:
        grads = call.gradients(owned, needs)
        p.write_to(*grads.buffers())
        dx, dw = backward(p, dy, kept[0], need_x, None)
        return dx, dw, grads.close()
    jobs = p.waits = []
    p.wants(call.trained)
    dx, dw = backward(p, dy, kept[0], need_x, None)

    def job() -> list[tuple[Tensor, Tensor]]:
        grads = call.gradients(owned, call.trained)
        p.write_to(*grads.buffers())
        while jobs:
            jobs.pop(0)()
        found: list[tuple[Tensor, Tensor]] = grads.deliver()
        return found

    defer(job, ())  # it reads copies
    return dx, dw, [None] * len(needs)
