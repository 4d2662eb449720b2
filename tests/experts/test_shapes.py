"""Places of the grid of pairs at the shapes where the compiled kernels change their ways, between NaN, on all of their
products: plain, and of bfloat16, emulated and the processor's."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import emulated, pairs
from helpers.comparing import assert_close
from helpers.emulated import INSTRUCTIONS
from helpers.pair_modules import EMPTY
from helpers.pair_truth import BOUNDS, HALVES, INTERLEAVED, TRUTHS
from helpers.pairs import Pair, Subject
from trimtab.experts import on_cpu
from trimtab.experts.quantized import FORMATS, every_code
from trimtab.kernels import expert_check
from trimtab.kernels.choose import KernelChoice
from trimtab.kernels.compiled import CompiledKernels

pytestmark = pytest.mark.xdist_group("emulated")  # one process compiles what they share
T, F32, B16 = "transposed", torch.float32, torch.bfloat16


def at(rows: int, dim: int, hidden: int, weights: str = "plain", empty: str = "last", **options: object) -> Pair:
    return Pair(
        module="mlp", weights=weights, kernels="cpu", rows=rows, dim=dim, hidden=hidden, empty=empty, experts=4,
        dtype=B16, fenced=True, **options,  # type: ignore[arg-type]
    )  # fmt: skip


ADDED = {"main_grad": "accumulate"}
SHAPES = [
    at(5, 1, 1, "bias"), at(5, 1, 1, T), at(9, 2, 3, f"{T}+bias", activation=INTERLEAVED),
    at(33, 31, 17, "bias", threads=2, **ADDED), at(34, 33, 47, T, activation="geglu", main_dtype=B16, **ADDED),
    at(50, 64, 64, activation=INTERLEAVED, **ADDED), at(50, 47, 33, f"{T}+bias", activation=INTERLEAVED, threads=2),
    at(40, 48, 65, "bias", activation="gelu", main_dtype=B16, **ADDED),
    at(40, 65, 31, f"{T}+bias", activation="relu_squared", threads=2), at(30, 513, 130, "bias"),
    at(30, 130, 515, T, threads=2), at(30, 34, 280, T), at(20, 600, 560, "bias", activation=INTERLEAVED),
    at(50, 64, 64, activation=HALVES, **ADDED), at(330, 290, 270, f"{T}+bias", "hot", activation=HALVES, threads=2),
    at(9, 1060, 35), at(9, 35, 1060, T, activation="gelu", threads=2),
    at(540, 150, 530, empty="hot", activation="relu_squared", threads=2), at(700, 32, 32, empty="hot", **ADDED),
    at(700, 37, 21, f"{T}+bias", "hot", threads=2), at(1100, 32, 16, empty="hot", threads=2, main_dtype=B16, **ADDED),
    at(700, 64, 96, empty="hot"), at(330, 300, 290, empty="hot"), at(330, 600, 200, empty="hot"),
    at(330, 1024, 150, T, "hot", activation=INTERLEAVED), at(330, 1030, 70, "bias", "hot"),
    at(1000, 520, 34, T, "hot", activation="gelu", threads=2), at(4, 64, 96),
    at(12, 320, 288, activation=INTERLEAVED, main_dtype=B16, **ADDED), at(60, 288, 64, f"{T}+bias", threads=2),
    at(90, 96, 544, activation="gelu", threads=2), at(9, 6208, 32), at(220, 64, 1300, threads=2), at(220, 1300, 64, T),
    at(220, 40, 1300, T, activation=INTERLEAVED), at(1, 320, 288, empty="one", main_grad="overwrite"),
    at(200, 320, 288, T, "one", **ADDED), at(256, 320, 288, empty="one", main_grad="overwrite"),
    at(256, 320, 544, T, "one"), at(257, 320, 288, T, "one", main_grad="overwrite"),
    at(257, 320, 288, empty="one", main_dtype=B16, **ADDED), at(7, 64, 96, T, activation=INTERLEAVED), at(30, 416, 32),
    at(80, 32, 544, activation="gelu"), at(60, 3104, 64, T, threads=2), at(37, 64, 96, "lora+whole", rank=4),
    at(37, 64, 96, "lora+shared+whole+bias", rank=4), at(37, 64, 96, f"{T}+lora+whole", rank=4),
    at(37, 64, 96, "lora+whole", activation="relu_squared", rank=4), at(37, 64, 96, "lora+whole", "all", rank=4),
    at(0, 64, 96, "lora+whole", "no row", rank=4), at(300, 64, 96, "lora+whole", rank=16),
    at(64, 416, 288, "lora+whole", rank=40), at(700, 32, 32, "lora+whole", "hot", rank=24),
    at(37, 48, 40, "lora+whole", rank=3),
]  # fmt: skip
CODED = [
    at(rows, dim, hidden, f"{name}{more}", rank=8)
    for name, form in FORMATS.items() if form.runs == 1
    for rows, dim, hidden, more in ((3, 128, 192, ""), (37, 128, 192, "+lora+bias"), (500, 128, 192, "+lora"),
                                    (64, 448, 320, "+lora"))
]  # fmt: skip


@cache
def truth_of(pair: Pair) -> dict[str, Tensor]:
    return Subject(replace(pair, threads=1, main_grad="off", fenced=False)).truth()


def results(pair: Pair, kernels: CompiledKernels | None = None) -> dict[str, Tensor]:
    """The output and every gradient, by these kernels."""
    with pytest.MonkeyPatch.context() as patch:
        if kernels is not None:
            choice = KernelChoice("cpu")
            patch.setattr(choice, "on", lambda *where: kernels)
            patch.setitem(pairs.KERNELS, "cpu", choice)
        subject = Subject(pair)
        return {name: value for name, value in subject.run(subject.trained).items() if value is not None}


def check(pair: Pair, kernels: CompiledKernels | None = None) -> None:
    truth = truth_of(replace(pair, threads=1, main_grad="off", fenced=False))
    found = results(pair, kernels)
    assert found.keys() == truth.keys()
    for name, value in found.items():
        assert_close(value, truth[name], max(BOUNDS[pair.dtype], 2e-5), name)


@cache
def kernels_of(products: str, made: str = "emulated") -> CompiledKernels:
    return emulated.emulated(products) if made == "emulated" else emulated.own(products)


@pytest.fixture(params=product(INSTRUCTIONS, ("emulated", "own")), ids=" ".join)
def kernels(request: pytest.FixtureRequest) -> CompiledKernels:
    return kernels_of(*request.param)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [F32, B16], ids=str)
@pytest.mark.parametrize("pair", [*SHAPES, *CODED], ids=str)
def test_every_shape(pair: Pair, dtype: torch.dtype) -> None:
    check(replace(pair, dtype=dtype, main_dtype=F32 if dtype is F32 else pair.main_dtype))


@pytest.mark.parametrize("pair", [*SHAPES, *CODED], ids=str)
def test_every_shape_by_products_of_bfloat16(kernels: CompiledKernels, pair: Pair) -> None:
    check(pair, kernels)


@pytest.mark.parametrize("empty", EMPTY)
def test_however_slots_fall(kernels: CompiledKernels, empty: str) -> None:
    for activation, weights in product(TRUTHS, ("plain", f"{T}+bias")):
        check(at(13, 16, 24, weights, empty, activation=activation), kernels)


@pytest.mark.parametrize("pair", [*SHAPES, *CODED[::3]], ids=str)
@pytest.mark.parametrize("products", INSTRUCTIONS)
def test_the_processor_has_the_bits_of_the_emulation(products: str, pair: Pair) -> None:
    own, emulation = (results(pair, kernels_of(products, made)) for made in ("own", "emulated"))
    for name, value in own.items():
        assert torch.equal(value, emulation[name]), name


@pytest.mark.parametrize("pair", [p for p in SHAPES if p.rows in (5, 60, 330) or p.dim in (47, 1060)], ids=str)
def test_parameters_in_float32_count_as_what_they_are_rounded_to(kernels: CompiledKernels, pair: Pair) -> None:
    low, choice = results(pair, kernels), KernelChoice("cpu")
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", B16):
        patch.setattr(choice, "on", lambda *where: kernels)
        patch.setitem(pairs.KERNELS, "cpu", choice)
        subject = Subject(pair)
        for name, leaf in subject.leaves.items():
            if name not in ("x", "w"):
                leaf.data = leaf.data.float()
        wide = subject.run(subject.trained)
    for name, value in low.items():
        assert torch.equal(wide[name].to(value.dtype), value), name  # type: ignore[union-attr]


@pytest.mark.parametrize(("rows", "hidden"), [(40, 289), (20, 1060), (560, 300)])
@pytest.mark.parametrize("activation", TRUTHS)
def test_delayed_gradients_are_the_same_bits(kernels: CompiledKernels, activation: str, rows: int, hidden: int) -> None:
    pair = at(rows, 40, hidden, activation=activation, empty="hot")
    now, later = (results(replace(pair, delayed=delayed), kernels) for delayed in (False, True))
    assert all(torch.equal(value, later[name]) for name, value in now.items())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("weights", ["plain", T])
@pytest.mark.parametrize(("dim", "hidden"), [(64, 96), (40, 24), (320, 288)])
@pytest.mark.parametrize("main_dtype", [F32, B16], ids=str)
def test_gradients_are_added_to_every_element(
    kernels: CompiledKernels, main_dtype: torch.dtype, dim: int, hidden: int, weights: str, threads: int
) -> None:
    """Element by element: each against the gradient that is written where nothing is added."""
    pair = at(600, dim, hidden, weights, "hot", threads=threads, main_dtype=main_dtype)
    written, added = (results(replace(pair, main_grad=mode), kernels) for mode in ("overwrite", "accumulate"))
    for name in ("gate_up", "down"):
        one, two = written[name].double(), added[name].double()
        rounding = 2**-8 * (one.abs() + pairs.STALE) * (main_dtype == B16) + 2**-8 * one.abs() * (main_dtype == B16)
        assert ((one - two).abs() <= rounding + 1e-6 * (one.abs() + 1)).all()
        assert one.abs().max() > 1


def test_their_start_up_test_passes_on_all(kernels: CompiledKernels) -> None:
    assert expert_check.first_lora_fault(kernels, every_code) is None


@pytest.mark.parametrize("wrong", ["scale_up", "down_scales", "up_b"])
def test_their_start_up_test_sees_what_is_wrong(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = CompiledKernels._run

    def wrongly(self: CompiledKernels, name: str, fields: dict[str, Any]) -> None:
        given = fields.get(wrong)
        if given is not None:
            fields = {**fields, wrong: given.roll(1, 0) if wrong == "up_b" else given + 1}
        run(self, name, fields)

    monkeypatch.setattr(CompiledKernels, "_run", wrongly)
    assert "wrong" in str(expert_check.first_lora_fault(CompiledKernels(), every_code))


def test_a_fault_is_said_and_such_experts_go_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = CompiledKernels()
    monkeypatch.setattr(KernelChoice, "on", lambda *where: kernels)
    monkeypatch.setattr(expert_check, "first_lora_fault", lambda *given: "y is wrong")
    monkeypatch.setattr(on_cpu, "forward", None)
    with pytest.warns(UserWarning, match="y is wrong.*block by block"):
        check(at(37, 64, 96, "lora+whole"))
