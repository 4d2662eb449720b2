"""Adapters and codes on every kind of products of bfloat16, emulated and the processor's, in memory of NaN; and what is
done where the start-up test of these finds a fault."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import test_low_rank as low_rank
import test_quantized as codes
import torch
from torch import Tensor

from helpers import emulated
from helpers.emulated import INSTRUCTIONS
from trimtab.experts import adapted_check, on_cpu
from trimtab.experts.quantized import FORMATS
from trimtab.kernels.choose import KernelChoice
from trimtab.kernels.compiled import CompiledKernels

pytestmark = pytest.mark.xdist_group("emulated")  # one process compiles what they share


def kernels_of(products: str, made: str) -> CompiledKernels:
    return emulated.emulated(products) if made == "emulated" else emulated.own(products)


@pytest.fixture(params=product(INSTRUCTIONS, ("emulated", "own")), ids=" ".join)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CompiledKernels:
    found = kernels_of(*request.param)
    monkeypatch.setattr(KernelChoice, "on", lambda *where: found)
    return found


def adapted(case: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the kernels make of it, and the truth."""
    given, ids, dy = low_rank.tensors(low_rank.CASES[case], torch.bfloat16)
    got = low_rank.ours(low_rank.CASES[case], given, ids, dy, "cpu")
    return got, low_rank.truth(low_rank.CASES[case], given, ids, dy)


@pytest.mark.parametrize(
    "case", ["plain", "shared", "transposed", "biases", "no_token", "many_rows", "more_than_a_step", "rows_in_steps"]
)
@pytest.mark.usefixtures("kernels")
def test_adapters(case: str) -> None:
    got, true = adapted(case)
    low_rank.check(got, true, low_rank.BOUNDS[torch.bfloat16])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", ["biases", "few_rows", "many_rows", "more_than_a_step"])
@pytest.mark.usefixtures("kernels")
def test_codes(case: str, name: str) -> None:
    made = codes.Made(codes.CASES[case], name, torch.bfloat16)
    codes.check(made.run("cpu"), made.truth(), torch.bfloat16)


@pytest.mark.parametrize("products", INSTRUCTIONS)
def test_the_processor_has_the_bits_of_the_emulation(products: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for made in ("own", "emulated"):
        backend = kernels_of(products, made)
        monkeypatch.setattr(KernelChoice, "on", lambda *where, backend=backend: backend)
        found.append(adapted("rows_in_steps")[0])
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())


def test_their_start_up_test_passes_on_all(kernels: CompiledKernels) -> None:
    assert adapted_check.first_adapted_fault(kernels) is None


@pytest.mark.parametrize("wrong", ["scale_up", "down_scales", "up_b"])
def test_their_start_up_test_sees_what_is_wrong(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = CompiledKernels._run

    def wrongly(self: CompiledKernels, name: str, fields: dict[str, Any]) -> None:
        given = fields.get(wrong)
        if given is not None:
            fields = {**fields, wrong: given.roll(1, 0) if wrong == "up_b" else given + 1}
        run(self, name, fields)

    monkeypatch.setattr(CompiledKernels, "_run", wrongly)
    assert "wrong" in str(adapted_check.first_adapted_fault(CompiledKernels()))


def test_a_fault_is_said_and_such_experts_go_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = CompiledKernels()
    monkeypatch.setattr(KernelChoice, "on", lambda *where: kernels)
    monkeypatch.setattr(adapted_check, "first_adapted_fault", lambda kernels: "y is wrong")
    monkeypatch.setattr(on_cpu, "forward", None)
    with pytest.warns(UserWarning, match="y is wrong.*block by block"):
        got, true = adapted("plain")
    low_rank.check(got, true, low_rank.BOUNDS[torch.bfloat16])
