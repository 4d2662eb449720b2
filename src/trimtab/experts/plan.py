"""The rows that a rank holds, grouped by expert: M rows -> R rows, one per kept (row, slot), segments aligned.

One stable sort of narrow keys over the slots; that of a dropped one lies behind the last expert. Nothing is M x E.

Legend: M rows, K experts per row, N = M * K slots, R expert rows (with padding), e local experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.errors import ConfigError, InputError
from trimtab.kernels.api import Backend
from trimtab.kernels.choose import kernels_of
from trimtab.kernels.rows import ExpertPlan as ExpertPlan
from trimtab.kernels.rows import csr_of, inverse_of, narrow
from trimtab.kernels.tensor_checks import no_values, recorded, static_by_default
from trimtab.layout import ALIGNMENTS
from trimtab.operators import operator
from trimtab.validation import assert_on_device, wide_ids


def plan_experts(
    ids_MK: Tensor, num_experts: int, *, alignment: int = 1, num_slots: int | None = None, static: bool | None = None,
    kernels: object = None,
) -> ExpertPlan:  # fmt: skip
    """Group the slots of `ids_MK` [M, K] by local expert.

    Ids outside 0..num_experts - 1 are dropped: -1 and the sentinel `num_experts` of other libraries alike.
    `num_slots` is the number of kept slots, or a bound of it, if known; else a static plan (the default where nothing
    may be read back) takes the bound N (+ padding); its expert rows beyond offsets_e[-1] are padding too.
    `kernels`: those that the plan is for, if they are known; the compiled ones make it themselves.

    Raises:
        ConfigError: no such alignment.
        InputError: more slots are kept than `num_slots`; a static plan does not see it.
    """
    if alignment not in ALIGNMENTS:
        raise ConfigError(f"alignment {alignment} is not one of {ALIGNMENTS}")
    ids_MK = wide_ids(ids_MK)
    rows, top_k = ids_MK.shape
    by_default = static_by_default(ids_MK)
    static = by_default if static is None else static
    place = getattr(kernels, "place_slots", None)
    if place is not None and not (static or by_default) and type(ids_MK) is Tensor:
        plan: ExpertPlan = place(ids_MK, num_experts, alignment)
        _check_slots(num_slots, plan.bag_index.shape[0])
        return plan
    on_device = getattr(kernels, "place_on_device", None)
    if on_device is not None and top_k and not recorded():
        placed: ExpertPlan = on_device(ids_MK, num_experts, alignment, num_slots)
        return _kept_promise(placed, num_slots, ids_MK.numel())
    if static and alignment == 1 and ids_MK.device.type != "cpu":
        return _kept_promise(_by_sorts(ids_MK, num_experts, num_slots), num_slots, ids_MK.numel())
    ids_N = ids_MK.reshape(-1)
    kept_N = (ids_N >= 0) & (ids_N < num_experts)
    key_N = torch.where(kept_N, ids_N, num_experts)
    order_N = torch.argsort(narrow(key_N, num_experts), stable=True)
    counts_e = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids_N.device)
    counts_e = counts_e.scatter_add(0, key_N.long(), torch.ones_like(order_N))[:num_experts]
    aligned_e = (counts_e + alignment - 1).div(alignment, rounding_mode="floor") * alignment
    offsets_e = torch.nn.functional.pad(aligned_e.cumsum(0), (1, 0))
    # An aligned segment starts later than a dense one by the padding of the experts before it.
    shift_e = offsets_e[:-1] - (counts_e.cumsum(0) - counts_e)
    place_N = inverse_of(order_N) + shift_e[key_N.clamp(max=num_experts - 1).long()]
    bound = (ids_N.shape[0] if num_slots is None else num_slots) + num_experts * (alignment - 1)
    total = bound if static else int(offsets_e[-1])
    slot_R = order_N.new_full((total + 1,), -1)
    slots_N = torch.arange(ids_N.shape[0], device=ids_N.device)
    slot_R = slot_R.scatter_(0, torch.where(kept_N, place_N, total), slots_N)[:total]
    row_R = slot_R.div(max(top_k, 1), rounding_mode="floor")
    row_csr = csr_of(place_N, kept_N, rows, num_slots, static=static)
    if not static:
        _check_slots(num_slots, row_csr.indices.shape[0])
    return ExpertPlan(slot_R, row_R, row_csr.indices, row_csr.indptr, counts_e, offsets_e)


def _by_sorts(ids_MK: Tensor, num_experts: int, num_slots: int | None) -> ExpertPlan:
    """A static plan of a few launches: slots sorted by expert, and where they went sorted by slot."""
    (rows, top_k), slots, device = ids_MK.shape, ids_MK.numel(), ids_MK.device
    each, total = max(top_k, 1), slots if num_slots is None else min(num_slots, slots)
    key_N = narrow(ids_MK.reshape(-1).clamp(-1, num_experts) % (num_experts + 1), num_experts)
    key_N, order_N = torch.sort(key_N, stable=True)
    offsets_e = torch.searchsorted(key_N, torch.arange(num_experts + 1, device=device, dtype=key_N.dtype))
    dropped_N = key_N == num_experts
    slot_R = order_N.masked_fill(dropped_N, -1)[:total]
    slot_N, place_N = torch.sort(order_N.masked_fill(dropped_N, slots), stable=True)
    bag_offsets = torch.searchsorted(slot_N, torch.arange(0, rows * each + 1, each, device=device))
    counts_e = offsets_e.diff()
    if total < slots:  # nobody reads beyond what was promised
        place_N, offsets_e = place_N[:total].clamp_(max=max(total - 1, 0)), offsets_e.clamp_(max=total)
    row_R = slot_R.div(each, rounding_mode="floor")
    return ExpertPlan(slot_R, row_R, place_N, bag_offsets, counts_e, offsets_e)


def _check_slots(num_slots: int | None, kept: int) -> None:
    if num_slots is not None and kept > num_slots:
        raise InputError(f"num_slots is {num_slots}, but {kept} slots are kept", phase="experts")


def _kept_promise(plan: ExpertPlan, num_slots: int | None, slots: int) -> ExpertPlan:
    """The plan, which holds no more than was promised: a device fails at a broken promise instead of dropping rows."""
    if num_slots is not None and num_slots < slots:
        assert_on_device(plan.bag_offsets[-1] <= num_slots, f"more slots are kept than num_slots={num_slots}")
    return plan


def slot_weights(w_MK: Tensor, plan: ExpertPlan, padding: bool = True) -> Tensor:
    """The routing weight of each expert row [R, 1]; 0 in padding, if somebody reads it."""
    if not padding and w_MK.device.type != "cpu":
        return w_MK.reshape(-1)[plan.slot_R][:, None]
    w_N1 = torch.nn.functional.pad(w_MK.reshape(-1), (0, 1))  # the last one serves padding
    return w_N1[plan.slot_R][:, None]  # slot -1 is the last


def slot_grads(dw_R: Tensor, plan: ExpertPlan, w_MK: Tensor) -> Tensor:
    """Gradients of expert rows back to their slots [M, K]; 0 for dropped slots."""
    slots = w_MK.numel()
    d_N1 = dw_R.new_zeros(slots + 1)
    if dw_R.device.type == "cpu":
        d_N1.scatter_(0, torch.where(plan.slot_R < 0, slots, plan.slot_R), dw_R)
    else:
        d_N1[plan.slot_R] = dw_R  # slot -1 is the last
    return d_N1[:slots].view_as(w_MK)


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
    slots = ids_MK.numel()
    bound = slots if num_slots is None else torch.sym_min(num_slots, slots)  # type: ignore[no-untyped-call]
    names = kernels if isinstance(kernels, str) else ""
    return ExpertPlan(*plan_op(ids_MK, num_experts, bound, num_slots is not None, whole, names))


def _plan(ids_MK: Tensor, num_experts: int, num_slots: int | None, kernels: Backend | str, whole: str) -> ExpertPlan:
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


def _plan_tensors(ids: Tensor, num_experts: int, bound: int, bounded: bool, whole: str, kernels: str) -> list[Tensor]:
    chosen = kernels_of(kernels, ids.device, torch.float32 if ids.device.type == "cpu" else torch.bfloat16)
    plan = _plan(ids, num_experts, bound if bounded else None, chosen, whole)
    slot_R, row_R, indices, *rest = plan
    short = bound - slot_R.shape[0]
    pad = torch.nn.functional.pad
    if not short:
        return [*plan]
    return [pad(slot_R, (0, short), value=-1), pad(row_R, (0, short), value=-1), pad(indices, (0, short)), *rest]


def _plan_fake(ids: Tensor, num_experts: int, bound: int, bounded: bool, whole: str, kernels: str) -> list[Tensor]:
    sizes = (bound, bound, bound, ids.shape[0] + 1, num_experts, num_experts + 1)
    return [ids.new_empty(size, dtype=torch.int64) for size in sizes]


plan_op = operator(
    "plan_experts(Tensor ids, SymInt num_experts, SymInt bound, bool bounded, str whole, str kernels) -> Tensor[]",
    _plan_tensors, _plan_fake,
)  # fmt: skip
"""An `ExpertPlan` of as many rows as `bound`; bounded: whether more kept slots than that are refused."""
