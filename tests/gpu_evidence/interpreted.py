"""The kernels between grouped GEMMs in Triton's interpreter, against float64. Run by test_interpreted.py, with
TRITON_INTERPRET=1, which must be set before Triton is imported. Prints a line for each part.

Whatever nobody may read holds NaN, and fresh memory too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.comparing import assert_close, gradients
from helpers.triton_checks import FALLS, Case, experts_are_true, inputs_of
from trimtab import ExpertMLP
from trimtab.experts.activations import activate
from trimtab.experts.plan import _by_sorts, plan_experts
from trimtab.experts.recipes import FP8Rowwise
from trimtab.kernels.choose import KernelChoice
from trimtab.kernels.rows import Csr
from trimtab.kernels.selftest import self_test
from trimtab.kernels.triton import glue
from trimtab.kernels.triton.glue import GATED, WORDS, GluedBackend
from trimtab.kernels.triton.moves import combine, gather, place_slots

BOUNDS = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
CPU, NAN = torch.device("cpu"), torch.nan
CHOICE = KernelChoice(GluedBackend())


def poisoned(rows: int, width: int, tail: int, dtype: torch.dtype, seed: int) -> Tensor:
    t = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    t[rows - tail :] = NAN
    return t


def activations(dtype: torch.dtype, hidden: int, rows: int = 7, tail: int = 2) -> None:
    """Each word, forward and backward, weights and a bias's share included, for slots in another order than rows."""
    g = torch.Generator().manual_seed(3)
    slot_R = torch.randperm(rows, generator=g)
    slot_R[rows - tail :] = -1
    w, kept = torch.rand(1, rows, generator=g), slot_R[: rows - tail]
    for word in WORDS:
        width = 2 * hidden if WORDS.index(word) < GATED else hidden
        pre, dh = poisoned(rows, width, tail, dtype, 4), poisoned(rows, hidden, tail, dtype, 5)
        true_pre = pre[: rows - tail].double().requires_grad_()
        true_w = w[0, kept].double().requires_grad_()
        act = activate(true_pre, word)
        h = act * true_w[:, None]
        d_pre, d_w = gradients(h, [true_pre, true_w], dh[: rows - tail])
        assert_close(glue.activate(word, pre, w, slot_R)[: rows - tail], h, BOUNDS[dtype], word)
        for more in (None, torch.full((rows,), 2.0, dtype=dtype)):
            got, hw, dw = glue.activate_backward(word, pre, dh, w, slot_R, more, True)
            assert hw is not None
            assert_close(got[: rows - tail], d_pre, BOUNDS[dtype], f"{word}: d_pre")
            assert_close(hw[: rows - tail], h, BOUNDS[dtype], f"{word}: w h")
            wanted = torch.zeros(rows, dtype=torch.float64).index_put((kept,), d_w + (0 if more is None else 2))
            assert_close(dw[0], wanted, BOUNDS[dtype], f"{word}: dw")
        assert glue.activate_backward(word, pre, dh, w, slot_R, None, False)[1] is None
        assert glue.activate(word, torch.full_like(pre, NAN), w, slot_R)[: rows - tail].isnan().all(), (
            f"{word}: NaN stays"
        )


def moves(dtype: torch.dtype) -> None:
    """Of rows as they come out of an exchange, packed with others that are NaN, of rows alone, and of expanded ones."""
    packed = torch.full((9, 64), NAN, dtype=dtype)
    packed[:, 8:48] = poisoned(9, 40, 0, dtype, 1)
    part, index, offsets = packed[:, 8:48], torch.tensor([3, -1, 0, 8, 8]), torch.tensor([0, 2, 2, 5, 5])
    for x in (part, part.contiguous()):
        assert torch.equal(gather(x, index), torch.where(index[:, None] < 0, 0, x[index]))
        assert gather(x[:0], index[:0]).shape == (0, 40)
        summed = combine(x, Csr(indices=torch.tensor([1, 7, 3, 2, 4, 99]), indptr=offsets))
        wanted = [x[[1, 7]], x[:0], x[[3, 2, 4]], x[:0]]
        assert_close(summed, torch.stack([rows.double().sum(0) for rows in wanted]), BOUNDS[dtype], "combine")
        assert combine(x, Csr(indices=index[:0], indptr=offsets[:1])).shape == (0, 40)
    assert torch.equal(gather(part[:1, :1].expand(4, 40), index[2:3]), part[:1, :1].expand(1, 40))


def gradients_are_written(dtype: torch.dtype) -> None:
    """What was made for experts without rows is NaN; a buffer that is not added to, too."""
    made, offsets = poisoned(4, 1100 * 2, 0, dtype, 2).view(4, 1100, 2), torch.tensor([0, 3, 3, 5, 5])
    made[1] = made[3] = NAN
    wanted = made.double().nan_to_num(0)
    for into in (dtype, torch.float32):
        for add in (False, True):
            out = torch.full((4, 1100, 2), 3.0 if add else NAN, dtype=into)
            glue.write_gradient(made, offsets, out, add)
            assert_close(out, wanted + 3 * add, BOUNDS[dtype], f"{into} {add}")


def plans() -> None:
    """That of a few sorts and that of three launches, in every integer."""
    for rows, top_k, experts in ((37, 2, 6), (1, 1, 1), (300, 8, 128), (0, 2, 4), (5, 3, 200)):
        for dropped in (0.0, 0.3, 1.0):
            g = torch.Generator().manual_seed(rows)
            ids = torch.randint(0, experts, (rows, top_k), generator=g)
            wild = torch.tensor([-1, -7, experts, experts + 9, 2**40])[torch.randint(0, 5, ids.shape, generator=g)]
            ids = ids.where(torch.rand(ids.shape, generator=g) >= dropped, wild)
            wanted = plan_experts(ids, experts, static=True)
            kept = int(wanted.offsets_e[-1])
            for given in (None, kept, kept + 3):
                for got in (_by_sorts(ids, experts, given), place_slots(ids, experts, num_slots=given)):
                    total = got.slot_R.shape[0]
                    for name in ("slot_R", "row_R", "bag_index"):
                        end = kept if name == "bag_index" else min(total, ids.numel())
                        assert torch.equal(getattr(got, name)[:end], getattr(wanted, name)[:end]), (name, rows, given)
                    for name in ("bag_offsets", "counts_e", "offsets_e"):
                        assert torch.equal(getattr(got, name), getattr(wanted, name)), (name, rows, given)
                    assert not total or int(got.bag_index.max()) < total
    same = torch.zeros(8, 1, dtype=torch.int64)
    few, fast = _by_sorts(same, 2, 5), place_slots(same, 2, num_slots=5)
    assert few.slot_R.tolist() == fast.slot_R.tolist() == fast.row_csr.indices.tolist() == [0, 1, 2, 3, 4]
    assert few.offsets_e.tolist() == [0, 5, 5]


def layers(case: Case, true: str = "torch", at: torch.dtype = torch.float64, **more: Any) -> None:
    """Of biases and other activations, against a backend of PyTorch alone, in float64: every gradient."""
    found = []
    for kernels, dtype in ((CHOICE, torch.float32), (KernelChoice(true), at)):
        torch.manual_seed(0)
        module = ExpertMLP(case.experts, case.dim, case.hidden, dtype=torch.float32, kernels=kernels, **more).to(dtype)
        x, ids, w, dy = inputs_of(replace(case, dtype=dtype), "cpu")
        y = module(x, ids, w)
        y.backward(dy)
        found.append([y, x.grad, w.grad, *(p.grad for p in module.parameters())])
    for i, (got, wanted) in enumerate(zip(*found, strict=True)):
        assert_close(got, wanted, 5e-6, f"{more}: result {i}")


def main() -> None:
    torch.use_deterministic_algorithms(True)
    for dtype in BOUNDS:
        for hidden in (40, 1500):
            activations(dtype, hidden)
        activations(dtype, 40, rows=0, tail=0)
        moves(dtype)
        gradients_are_written(dtype)
        print(f"glue {dtype}")
        assert self_test(GluedBackend(), CPU, dtype).fault is None
        print(f"self-test {dtype}")
    plans()
    print("plans")
    with pytest.raises(RuntimeError, match="more slots are kept than num_slots=3"):
        plan_experts(torch.arange(4)[:, None], 4, num_slots=3, kernels=GluedBackend())
    experts = Case(kernels=CHOICE, rows=30, experts=5, dim=48, hidden=32)
    for dtype in (torch.float32, torch.bfloat16):
        for fall in FALLS:
            experts_are_true(replace(experts, fall=fall, dtype=dtype), "cpu")
        experts_are_true(replace(experts, rows=0, dtype=dtype), "cpu")
        for mode in ("accumulate", "overwrite"):
            experts_are_true(replace(experts, fall="cold", dtype=dtype, main_grad=mode), "cpu")
        print(f"experts {dtype}")
    for more in ({"bias": True}, {"activation": "geglu"}, {"activation": "gelu_tanh"}, {"activation": "relu_squared"}):
        layers(replace(experts, fall="dropped", dtype=torch.float32), **more)
    layers(experts, "grouped_mm", torch.float32, recipe=FP8Rowwise(backend="emulated"))  # which pads with zeros
    print("biases, other activations, a recipe")


if __name__ == "__main__":
    main()
