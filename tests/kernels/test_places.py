"""The plan of a rank's experts by the compiled kernels against the one by sorting."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

from trimtab.experts.plan import plan_experts
from trimtab.kernels.compiled import compiled_kernels
from trimtab.layout import ALIGNMENTS

E = 5
IDS = {
    "any": torch.randint(-2, E + 2, (70, 3), generator=torch.Generator().manual_seed(1)),
    "one expert": torch.full((40, 2), 3), "same expert twice": torch.tensor([[2, 2], [4, 2]]),
    "all dropped": torch.tensor([[-1, E], [2**40, -(2**40)]]), "no rows": torch.zeros(0, 2, dtype=torch.int64),
    "no slots": torch.zeros(3, 0, dtype=torch.int64), "int32": torch.arange(24, dtype=torch.int32).view(12, 2) % E,
    "not contiguous": (torch.arange(24).view(2, 12) % E).t(),
}  # fmt: skip


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("ids", IDS)
def test_places_are_those_of_the_sort(ids: str, alignment: int) -> None:
    got = plan_experts(IDS[ids], E, alignment=alignment, kernels=compiled_kernels())._asdict()
    want = plan_experts(IDS[ids], E, alignment=alignment)._asdict()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
        assert got[name].dtype == tensor.dtype


@pytest.mark.parametrize(
    ("dtype", "experts"),
    [(torch.uint8, 256), (torch.int8, 128), (torch.int16, 2**15), *((t, 8) for t in (torch.uint16, torch.uint64))],
)
def test_ids_in_any_integers(dtype: torch.dtype, experts: int) -> None:
    ids = torch.tensor([[0, min(experts - 1, 127)], [1, 2]])
    want = plan_experts(ids, experts)._asdict()
    for got in (plan_experts(ids.to(dtype), experts, kernels=kernels) for kernels in (None, compiled_kernels())):
        assert all(torch.equal(value, want[name]) for name, value in got._asdict().items())


def test_a_static_plan_is_made_by_sorting() -> None:
    """Its sizes must not depend on what ids hold."""
    got = plan_experts(IDS["any"], E, static=True, kernels=compiled_kernels())
    assert got.slot_R.shape[0] == IDS["any"].numel()


def test_no_more_is_kept_than_is_needed() -> None:
    ids = torch.full((1000, 8), -1)
    ids[::10, 3] = 1
    plan = plan_experts(ids, E, kernels=compiled_kernels())
    assert max(t.untyped_storage().nbytes() for t in (plan.slot_R, plan.row_R, plan.row_csr.indices)) == 100 * 8


def test_values_that_are_not_there_are_not_read() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        plan = plan_experts(IDS["any"], E, kernels=compiled_kernels())
        with pytest.raises(DataDependentOutputException):
            plan_experts(IDS["any"], E, kernels=compiled_kernels(), static=False)
    assert isinstance(plan.slot_R, FakeTensor)
    assert plan.slot_R.shape == (IDS["any"].numel(),)
