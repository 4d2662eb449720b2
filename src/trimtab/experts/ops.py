"""The expert MLP as operators of `torch.library`: eager mode, graphs, tensors without values, FLOP counters see these.

    trimtab::experts                     y, pre     from x, the routing weights and the parameters
    trimtab::experts_backward            dx, dw, and the parameters' gradients, or d_pre where these come later
    trimtab::experts_weight_gradients    the parameters' gradients, later
    trimtab::plan_experts                which slots go to which expert; in graphs alone

The first three hand their operands to the first backend that covers them: the device's own, or grouped products by
blocks.

Legend: M rows, K slots per row, R expert rows, e local experts, D model dim, I width of the pre-activations,
F expert hidden dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from trimtab.autograd import without_autocast
from trimtab.errors import InputError
from trimtab.experts.operands import Operands, Targets, width_of
from trimtab.experts.plan import ExpertPlan, plan_experts
from trimtab.kernels.api import Backend
from trimtab.kernels.choose import kernels_of
from trimtab.kernels.tensor_checks import no_values
from trimtab.operators import operator
from trimtab.validation import assert_on_device

READS = "Tensor x, Tensor w, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias, Tensor[] plan"
OPTIONS = "str activation, bool transposed, str kernels"
WRITES = "Tensor(a!)[] out, bool[] wanted, bool[] adds"


def operands_of(
    x: Tensor, w: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
    plan: Sequence[Tensor], word: str, transposed: bool, kernels: str,
) -> Operands:  # fmt: skip
    return Operands(
        x=x, w=w, up=up, down=down, up_bias=up_bias, down_bias=down_bias, transposed=transposed, word=word,
        plan=ExpertPlan(*plan), kernels=kernels_of(kernels, x.device, x.dtype),
    )  # fmt: skip


def backend_of(o: Operands, later: bool = False) -> Any:
    """The module that computes these. later: weight gradients come in a call of their own."""
    if o.kernels.name == "cpu":
        from trimtab.experts import on_cpu

        if on_cpu.covers(o):
            return on_cpu
    if o.kernels.name == "triton" and not later:
        from trimtab.experts import on_triton

        if on_triton.covers(o):
            return on_triton
    from trimtab.experts import by_blocks

    return by_blocks


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    *reads, keep = args
    o = operands_of(*reads)
    with without_autocast():
        found: tuple[Tensor, Tensor] = backend_of(o).forward(o, keep)
    return found


def _forward_fake(x: Tensor, w: Tensor, up: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, plan, _, transposed, _, keep = rest
    return x.new_empty(x.shape), x.new_empty(plan[0].shape[0] if keep else 0, width_of(up, transposed))


def _backward(dy: Tensor, pre: Tensor, out: Any, wanted: Any, adds: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *reads, need_x, later = args
    o = operands_of(*reads)
    d_pre = o.kernels.empty_like(pre) if later else None
    with without_autocast():
        dx, dw = backend_of(o, later).backward(o, dy, pre, Targets.of(out, wanted, adds), need_x, d_pre)
    nothing = o.x.new_empty(0)
    return nothing if dx is None else dx, dw, nothing if d_pre is None else d_pre


def _backward_fake(
    dy: Tensor, pre: Tensor, out: Any, wanted: Any, adds: Any, x: Tensor, w: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, need_x, later = rest
    return x.new_empty(x.shape if need_x else 0), w.new_empty(w.shape), pre.new_empty(pre.shape if later else 0)


def _weight_gradients(dy: Tensor, pre: Tensor, d_pre: Tensor, out: Any, wanted: Any, adds: Any, *reads: Any) -> None:
    o = operands_of(*reads)
    backend_of(o, later=True).weight_gradients(o, dy, pre, d_pre, Targets.of(out, wanted, adds))


def flops_of(up: Sequence[int], down: Sequence[int], plan: Sequence[Sequence[int]], ups: int, downs: int) -> int:
    """Of so many products with each."""
    return int(2 * plan[0][0] * (ups * prod(up[1:]) + downs * prod(down[1:])))


def _forward_flops(*shapes: Any, **kwargs: Any) -> int:
    _, _, up, down, _, _, plan, *_ = shapes
    return flops_of(up, down, plan, 1, 1)


def _backward_flops(*shapes: Any, **kwargs: Any) -> int:
    _, _, _, wanted, _, _, _, up, down, _, _, plan, *_, need_x, _ = shapes
    return flops_of(up, down, plan, need_x + wanted[0], 1 + wanted[1])


def _weight_gradients_flops(*shapes: Any, **kwargs: Any) -> int:
    _, _, _, _, wanted, _, _, _, up, down, _, _, plan, *_ = shapes
    return flops_of(up, down, plan, int(wanted[0]), int(wanted[1]))


def plan_for(
    ids_MK: Tensor, num_experts: int, num_slots: int | None, kernels: Backend | str, whole: str = ""
) -> ExpertPlan:
    """`plan_experts`, in a graph as an operator with as many rows as there are slots.

    whole: who says that each slot names an expert, and is named where one does not. "": slots may be dropped.

    Raises:
        InputError: more slots are kept than `num_slots`, on the CPU; some are dropped, with `whole`.
    """
    if not torch.compiler.is_compiling():
        return _plan(ids_MK, num_experts, num_slots, kernels, whole)
    bound = ids_MK.numel() if num_slots is None else num_slots
    names = kernels if isinstance(kernels, str) else ""
    return ExpertPlan(*plan_op(ids_MK, num_experts, bound, num_slots is not None, whole, names))


def _plan(
    ids_MK: Tensor, num_experts: int, num_slots: int | None, kernels: Backend | str, whole: str
) -> ExpertPlan:  # fmt: skip
    if getattr(kernels, "name", "") == "triton":
        from trimtab.kernels.triton.moves import place_slots

        plan = place_slots(ids_MK, num_experts, num_slots=num_slots)
    else:
        plan = plan_experts(ids_MK, num_experts, num_slots=num_slots, kernels=kernels)
    if whole and not no_values(ids_MK.device):
        _refuse_dropped(whole, plan, ids_MK, num_experts)
    return plan


def _refuse_dropped(whole: str, plan: ExpertPlan, ids_MK: Tensor, num_experts: int) -> None:
    """On a device, trip an assertion there."""
    if ids_MK.device.type != "cpu":
        kept = plan.counts_e.sum() == ids_MK.numel()
        assert_on_device(kept, f"{whole}: ids outside 0..{num_experts - 1}")
    elif dropped := ids_MK.numel() - plan.bag_index.shape[0]:
        raise InputError(
            f"{whole}: {dropped} slot(s) have an id outside 0..{num_experts - 1}. Does the router score as many "
            "experts as there are?",
            phase="experts",
        )


def _plan_tensors(
    ids: Tensor, num_experts: int, bound: int, bounded: bool, whole: str, kernels: str
) -> list[Tensor]:  # fmt: skip
    dtype = torch.float32
    chosen = kernels_of(kernels, ids.device, dtype) if ids.device.type == "cpu" else ""
    plan = _plan(ids, num_experts, bound if bounded else None, chosen, whole)
    slot_R, row_R, indices, *rest = plan
    short = bound - slot_R.shape[0]
    pad = torch.nn.functional.pad
    return [pad(slot_R, (0, short), value=-1), pad(row_R, (0, short), value=-1), pad(indices, (0, short)), *rest]


def _plan_fake(
    ids: Tensor, num_experts: int, bound: int, bounded: bool, whole: str, kernels: str
) -> list[Tensor]:  # fmt: skip
    sizes = (bound, bound, bound, ids.shape[0] + 1, num_experts, num_experts + 1)
    return [ids.new_empty(size, dtype=torch.int64) for size in sizes]


plan_op = operator(
    "plan_experts(Tensor ids, SymInt num_experts, SymInt bound, bool bounded, str whole, str kernels) -> Tensor[]",
    _plan_tensors,
    _plan_fake,
)
"""An `ExpertPlan` of as many rows as `bound`; bounded: whether more kept slots than that are refused."""

experts_op = operator(
    f"experts({READS}, {OPTIONS}, bool keep) -> (Tensor, Tensor)", _forward, _forward_fake, _forward_flops
)
"""y [M, D], and the pre-activations [R, I], [0, I] unless `keep`. x in the dtype to compute in, w float32 or wider."""

experts_backward_op = operator(
    f"experts_backward(Tensor dy, Tensor pre, {WRITES}, {READS}, {OPTIONS}, bool need_x, bool later) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    _backward_flops,
)
"""dx, empty unless `need_x`; dw; and, with `later`, d_pre [R, I] in place of the parameters' gradients in `out`.

wanted: whether there is one of up, down, up_bias and down_bias in `out`. adds: of those in `out`, which are added to.
"""

experts_weight_gradients_op = operator(
    f"experts_weight_gradients(Tensor dy, Tensor pre, Tensor d_pre, {WRITES}, {READS}, {OPTIONS}) -> ()",
    _weight_gradients,
    lambda *args: None,
    _weight_gradients_flops,
)
"""The parameters' gradients in `out`, from what `experts_backward` left. Of the
weights only shapes are read, which FSDP2 leaves when it takes their memory."""
