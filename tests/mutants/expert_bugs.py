"""Bugs of the grouped GEMMs and of what is saved between them.

Legend: M rows, K slots per row, R expert rows, e local experts, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from mutants.patching import Mutant, Patches
from trimtab.experts import mlp, passes
from trimtab.experts import plan as plans
from trimtab.experts.activations import SwiGLU
from trimtab.experts.plan import ExpertPlan, plan_experts
from trimtab.experts.product import Product
from trimtab.kernels.api import Block
from trimtab.kernels.rows import Csr, combine_rows
from trimtab.kernels.torch_mm import TorchBackend

NAN = float("nan")
"""Stands for memory that nobody has written: what is left there by chance may well be zeros."""


def _swapped_gate(p: Patches) -> None:
    def swap(pre: Tensor) -> Tensor:
        return pre.roll(pre.shape[-1] // 2, -1)

    def backward(self: SwiGLU, pre: Tensor, dh: Tensor) -> Any:
        return swap(back(self, swap(pre), dh))

    back = SwiGLU.backward
    p.wrap(SwiGLU, "forward", lambda act: lambda self, pre: act(self, swap(pre)))
    p.put(SwiGLU, "backward", backward)


def _tail(p: Patches) -> None:
    def static(*args: Any, **kwargs: Any) -> ExpertPlan:
        return plan_experts(*args, **{**kwargs, "static": True, "num_slots": None})

    def combine(rows_RD: Tensor, csr: Csr, weights_R: Tensor | None = None) -> Tensor:
        summed = combine_rows(rows_RD, csr, weights_R)
        tail = torch.full_like(rows_RD[int(csr.indptr[-1]) :], NAN)
        summed[:1] += tail.sum(0)
        return summed

    p.put(plans, "plan_experts", static)
    p.put(passes, "combine_rows", combine)


def _tail_bag(p: Patches) -> None:
    def combine(rows_RD: Tensor, csr: Csr, weights_R: Tensor | None = None) -> Tensor:
        each = None if weights_R is None else weights_R[csr.indices]
        return embedding_bag(csr.indices, rows_RD, csr.indptr[:-1], mode="sum", per_sample_weights=each)

    def static(*args: Any, **kwargs: Any) -> ExpertPlan:
        return plan_experts(*args, **{**kwargs, "static": True, "num_slots": None})

    p.put(plans, "plan_experts", static)
    p.put(passes, "combine_rows", combine)


def _none_for_empty(p: Patches) -> None:
    @p.around(mlp._Experts, "backward")
    def backward(original: Any, ctx: Any, dy: Tensor) -> Any:
        call, d_x, d_w, *weights = original(ctx, dy)
        empty = ctx.call.plan.row_R.shape[0] == 0
        return call, d_x, d_w, *([None] * len(weights) if empty else weights)


def _change_wgrad(p: Patches, change: Callable[[Any, Tensor, Tensor, Tensor], None]) -> None:
    """change: (what takes a and b and writes a^T b, a, b, how many experts each row is before the layer's last).

    Behind the kernels, whose self-test sees nothing.
    """

    @p.around(Product, "_write_values")
    def weight(original: Any, of: Product, a: Tensor, b: Tensor, block: Block) -> None:
        last = of.offsets_e.shape[0] - 2
        before = last - torch.arange(block.experts.start, block.experts.stop)
        before_R1 = before.repeat_interleave(torch.tensor(block.sizes))[:, None]
        change(lambda a, b: original(of, a, b, block), a, b, before_R1)


def _empty_unwritten(p: Patches) -> None:
    @p.around(Product, "_write_values")
    def weight(original: Any, of: Product, a: Tensor, b: Tensor, block: Block) -> None:
        original(of, a, b, block)
        of.sink.into[0][block.experts][torch.tensor(block.sizes) == 0] = NAN  # type: ignore[union-attr, index]


def _last_group(p: Patches) -> None:
    _change_wgrad(p, lambda do, a, b, before_R1: do(a.masked_fill(before_R1 == 0, 0), b))


def _overwritten(p: Patches) -> None:
    def change(do: Any, a: Tensor, b: Tensor, before_R1: Tensor) -> None:
        first = torch.arange(len(a))[:, None] < len(a) // 2
        do(a.masked_fill(~first, 0), b)
        do(a.masked_fill(first, 0), b)

    _change_wgrad(p, change)


def _backward_weight(p: Patches) -> None:
    @p.around(passes, "backward")
    def backward(original: Any, *given: Any) -> Any:
        inner = Patches()
        inner.wrap(passes, "slot_weights", lambda taken: lambda w_MK, plan: torch.ones_like(taken(w_MK, plan)))
        try:
            return original(*given)
        finally:
            inner.undo()


def _bf16_experts(p: Patches) -> None:
    p.put(TorchBackend, "compute_dtype", lambda self, dtype: torch.bfloat16)


def _bf16_sum(p: Patches) -> None:
    def combine(rows: Tensor, csr: Csr, weights: Tensor | None = None) -> Tensor:
        narrow = None if weights is None else weights.bfloat16()
        return combine_rows(rows.bfloat16(), csr, narrow).to(rows.dtype)

    p.everywhere(combine_rows, combine)


def _once_per_expert(p: Patches) -> None:
    def deduped(ids_MK: Tensor, num_experts: int, **kwargs: Any) -> ExpertPlan:
        same = (ids_MK[:, :, None] == ids_MK[:, None, :]).tril(-1).any(-1)
        return plan_experts(ids_MK.masked_fill(same, -1), num_experts, **kwargs)

    p.put(plans, "plan_experts", deduped)


MUTANTS = (
    Mutant(name="gate_and_up_swapped", patch=_swapped_gate,
           says="gate and up rows swapped by a converter that shapes cannot tell (transformers#47031)"),
    Mutant(name="tail_not_zeroed", patch=_tail, look="1r-local/dropped/*",
           says="rows beyond the last offset are unset and summed as if they were zeros (pytorch#193633)"),
    Mutant(name="tail_in_last_bag", patch=_tail_bag, look="1r-local/dropped/*",
           says="what a static plan has behind the last segment joins the last token's sum"),
    Mutant(name="no_gradient_without_tokens", patch=_none_for_empty, look="1r-local/all_dropped/*",
           says="experts without tokens get None for a gradient (the gradient contract; DDP hangs on it)"),
    Mutant(name="empty_expert_unwritten", patch=_empty_unwritten, look="1r-local/cold_rank/*",
           says="the weight gradient of a zero-size group is never written (pytorch#172439)"),
    Mutant(name="last_group_skipped", patch=_last_group,
           says="the weight gradient leaves out the last group"),
    Mutant(name="wgrad_overwritten", patch=_overwritten,
           says="weight gradients of an expert's blocks overwrite each other instead of adding up (TE#3019)"),
    Mutant(name="backward_without_weight", patch=_backward_weight,
           says="the backward of the combine leaves out the routing weight"),
    Mutant(name="experts_in_bf16", patch=_bf16_experts,
           says="experts are cast to bfloat16 in a float32 model (torchtitan, by backend)"),
    Mutant(name="sum_in_bf16", patch=_bf16_sum,
           says="a token's experts are summed in bfloat16 (torchtitan, by backend)"),
    Mutant(name="rows_summed_not_slots", patch=_once_per_expert, look="1r-local/duplicates/*",
           says="combine sums rows instead of slots: an expert chosen twice counts once"),
)  # fmt: skip
