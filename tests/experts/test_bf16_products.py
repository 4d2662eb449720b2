"""Expert MLPs on products of bfloat16 pairs, emulated and by the processor: against the float64 oracle, against each
other, and what a row's bits depend on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import test_expert_fused as fused
import test_expert_mlp as grid
import torch
from torch import Tensor

from helpers import emulated
from helpers.comparing import assert_close
from helpers.emulated import INSTRUCTIONS, fenced, fences
from helpers.threads import torch_threads
from helpers.weights import expert_weights
from trimtab import oracle
from trimtab.experts.activations import ACTIVATIONS
from trimtab.experts.grad_sink import GradSink
from trimtab.experts.mlp import expert_mlp
from trimtab.experts.module import ExpertMLP
from trimtab.experts.plan import plan_experts
from trimtab.kernels.compiled import CompiledKernels

pytestmark = pytest.mark.xdist_group("emulated")  # one process compiles what they share
E, K = 4, 2
START = 16.0
"""In a main_grad: of the gradients' size, or its loss would not be seen."""
NAMES = ("x", "w", "up", "down", "up_bias", "down_bias")


@cache
def kernels_of(products: str, made: str = "emulated") -> CompiledKernels:
    return emulated.emulated(products) if made == "emulated" else emulated.own(products)


@pytest.fixture(params=product(INSTRUCTIONS, ("emulated", "own")), ids=" ".join)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CompiledKernels:
    """The other tests' cases take them too."""
    found = kernels_of(*request.param)
    for module in (grid, fused):
        monkeypatch.setattr(module, "get_backend", lambda name, device: found)
    monkeypatch.setattr(grid, "VARIANTS", fused.BUILT_IN)
    return found


@dataclass(frozen=True)
class Case:
    """rows: tokens. main: dtype of a main_grad that is added to, or with `overwrite` is not, if there is one.

    hot: every token goes to expert 1. alone: and to no other, so that it has as many rows. wide: parameters are in
    float32, under autocast.
    """

    rows: int
    D: int
    F: int
    activation: str = "swiglu"
    transposed: bool = False
    bias: bool = False
    threads: int = 1
    main: torch.dtype | None = None
    overwrite: bool = False
    hot: bool = False
    alone: bool = False
    wide: bool = False


CASES = (
    Case(rows=5, D=1, F=1, bias=True),
    Case(rows=5, D=1, F=1, transposed=True),
    Case(rows=9, D=2, F=3, activation="clamped_swiglu", transposed=True, bias=True),
    Case(rows=33, D=31, F=17, threads=2, bias=True, main=torch.float32),
    Case(rows=34, D=33, F=47, transposed=True, activation="geglu", main=torch.bfloat16),
    Case(rows=50, D=64, F=64, activation="clamped_swiglu", main=torch.float32),
    Case(rows=50, D=47, F=33, activation="clamped_swiglu", transposed=True, threads=2, bias=True),
    Case(rows=40, D=48, F=65, activation="gelu", bias=True, main=torch.bfloat16),
    Case(rows=40, D=65, F=31, activation="relu_squared", transposed=True, bias=True, threads=2),
    Case(rows=30, D=513, F=130, bias=True),
    Case(rows=30, D=130, F=515, transposed=True, threads=2),
    Case(rows=30, D=34, F=280, transposed=True),
    Case(rows=20, D=600, F=560, activation="clamped_swiglu", bias=True),
    Case(rows=50, D=64, F=64, activation="clamped_halves", main=torch.float32),
    Case(rows=330, D=290, F=270, activation="clamped_halves", hot=True, transposed=True, threads=2, bias=True),
    Case(rows=9, D=1060, F=35),
    Case(rows=9, D=35, F=1060, activation="gelu", transposed=True, threads=2),
    Case(rows=540, D=150, F=530, activation="relu_squared", hot=True, threads=2),
    Case(rows=700, D=32, F=32, hot=True, main=torch.float32),
    Case(rows=700, D=37, F=21, hot=True, transposed=True, threads=2, bias=True),
    Case(rows=1100, D=32, F=16, hot=True, threads=2, main=torch.bfloat16),
    Case(rows=700, D=64, F=96, hot=True),
    Case(rows=330, D=300, F=290, hot=True),
    Case(rows=330, D=290, F=270, activation="clamped_swiglu", hot=True, transposed=True, bias=True),
    Case(rows=330, D=600, F=200, hot=True),
    Case(rows=330, D=1024, F=150, activation="clamped_swiglu", hot=True, transposed=True),
    Case(rows=330, D=1030, F=70, hot=True, bias=True),
    Case(rows=1000, D=520, F=34, activation="gelu", hot=True, transposed=True, threads=2),
    Case(rows=4, D=64, F=96),
    Case(rows=12, D=320, F=288, activation="clamped_swiglu", main=torch.bfloat16),
    Case(rows=60, D=288, F=64, transposed=True, threads=2, bias=True),
    Case(rows=90, D=96, F=544, activation="gelu", threads=2),
    Case(rows=9, D=6208, F=32),
    Case(rows=220, D=64, F=1300, threads=2),
    Case(rows=220, D=1300, F=64, transposed=True),
    Case(rows=220, D=40, F=1300, activation="clamped_swiglu", transposed=True),
    Case(rows=1, D=320, F=288, hot=True, alone=True, main=torch.float32, overwrite=True),
    Case(rows=200, D=320, F=288, hot=True, alone=True, transposed=True, main=torch.float32),
    Case(rows=256, D=320, F=288, hot=True, alone=True, main=torch.float32, overwrite=True),
    Case(rows=256, D=320, F=544, hot=True, alone=True, transposed=True),
    Case(rows=257, D=320, F=288, hot=True, alone=True, transposed=True, main=torch.float32, overwrite=True),
    Case(rows=257, D=320, F=288, hot=True, alone=True, main=torch.bfloat16),
)


@dataclass(frozen=True)
class Operands:
    """Between NaN; expert 2 gets nothing."""

    x: Tensor
    w: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    ids: Tensor
    dy: Tensor


def drawn(c: Case) -> Operands:
    g = torch.Generator().manual_seed(7)
    width, stored = fused.BUILT_IN[c.activation].width, torch.float32 if c.wide else torch.bfloat16

    def leaf(*shape: int, scale: float = 1.0, dtype: torch.dtype = stored) -> Tensor:
        return fenced((torch.randn(*shape, generator=g) * scale).to(dtype)).requires_grad_()

    x = leaf(c.rows, c.D, dtype=torch.bfloat16)
    up, down = leaf(E, width * c.F, c.D, scale=c.D**-0.5), leaf(E, c.D, c.F, scale=c.F**-0.5)
    up_bias, down_bias = (leaf(E, width * c.F), leaf(E, c.D)) if c.bias else (None, None)
    w = torch.rand(c.rows, K, generator=g).requires_grad_()
    ids = torch.tensor([0, 1, 3, -1])[torch.randint(0, 4, (c.rows, K), generator=g)]
    if c.hot:
        ids[:, 0] = 1
    if c.alone:
        ids[:, 1] = -1
    dy = fenced(torch.randn(c.rows, c.D, generator=g).bfloat16())
    return Operands(x, w, up, down, up_bias, down_bias, ids, dy)


def run(kernels: CompiledKernels, c: Case) -> dict[str, Tensor]:
    """Output and gradients."""
    o, v = drawn(c), fused.BUILT_IN[c.activation]
    x, w, up, down, up_bias, down_bias = o.x, o.w, o.up, o.down, o.up_bias, o.down_bias
    given = [fenced(t.detach().transpose(1, 2)) if c.transposed else t.detach() for t in (up, down)]
    for p in given:
        p.requires_grad_()
        if c.main is not None:
            p.main_grad = fenced(torch.full(p.shape, START, dtype=c.main))
    leaves: list[Any] = [t for t in (x, w, *given, up_bias, down_bias) if t is not None]
    with torch_threads(c.threads), torch.autocast("cpu", torch.bfloat16, enabled=c.wide):
        y = expert_mlp(
            x, w, plan_experts(o.ids, E),
            *expert_weights(up=given[0], down=given[1], up_bias=up_bias, down_bias=down_bias, transposed=c.transposed),
            v.ours, kernels,
            sink=GradSink("off" if c.main is None else "overwrite" if c.overwrite else "accumulate"),
        )  # fmt: skip
        y.backward(o.dy)
    grads = [t.grad for t in leaves]
    if c.main is not None:
        for i in (2, 3):
            grads[i] = leaves[i].main_grad.double() - (0.0 if c.overwrite else START)
            assert fences(leaves[i].main_grad).isnan().all()
    ours = [g.transpose(1, 2) if c.transposed and i in (2, 3) else g for i, g in enumerate(grads)]
    return {"y": y, **dict(zip(NAMES, ours, strict=False))}


@cache
def truth_of(c: Case) -> dict[str, Tensor]:
    """The oracle's, which knows nothing of how it is to be computed."""
    o, v = drawn(c), fused.BUILT_IN[c.activation]

    def rounded(pre: Tensor) -> Tensor:
        return v.truth(pre + (pre.bfloat16().double() - pre).detach())

    exact = [
        None if t is None else t.detach().double().requires_grad_()
        for t in (o.x, o.w, o.up, o.down, o.up_bias, o.down_bias)
    ]
    X, W, UP, DOWN, *biases = exact
    truth = oracle.moe(X, o.ids, W, UP, DOWN, up_bias_EI=biases[0], down_bias_ED=biases[1], activation=rounded)
    wanted = torch.autograd.grad(truth, [t for t in exact if t is not None], o.dy.double())
    return {"y": truth.detach(), **dict(zip(NAMES, wanted, strict=False))}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients_are_right_to_bfloat16(kernels: CompiledKernels, case: Case) -> None:
    truth = truth_of(replace(case, transposed=False, threads=1, main=None, overwrite=False))
    for name, ours in run(kernels, case).items():
        assert_close(ours, truth[name], 3e-2, name)


@pytest.mark.parametrize("case", [c for c in CASES if c.rows in (5, 60, 330) or c.D in (47, 1060)], ids=str)
def test_parameters_in_float32_count_as_what_they_are_rounded_to(kernels: CompiledKernels, case: Case) -> None:
    low, wide = run(kernels, case), run(kernels, replace(case, wide=True))
    for name, ours in wide.items():
        assert torch.equal(ours.to(low[name].dtype), low[name]), name


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("D", "F"), [(64, 96), (40, 24), (320, 288)])
@pytest.mark.parametrize(("main", "offset"), [(torch.float32, 0), (torch.bfloat16, 0), (torch.bfloat16, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added_to_every_element(
    kernels: CompiledKernels, dtype: torch.dtype, main: torch.dtype, offset: int, D: int, F: int, transposed: bool,
    threads: int,
) -> None:  # fmt: skip
    """Element by element: each against the gradient that is written where nothing is added.

    offset: of a main_grad in a flat buffer, from where a line of the cache begins.
    """
    g = torch.Generator().manual_seed(D)
    ids = torch.tensor([0, 0, 0, 1, 3, -1])[torch.randint(0, 6, (600, 1), generator=g)]
    x, w = torch.randn(600, D, generator=g).to(dtype), torch.rand(600, 1, generator=g)
    shapes = [(E, D, 2 * F), (E, F, D)] if transposed else [(E, 2 * F, D), (E, D, F)]
    up, down = ((torch.randn(s, generator=g) * D**-0.5).to(dtype).requires_grad_() for s in shapes)
    found: list[list[Tensor]] = []
    starts = [fenced(torch.randn(s, generator=g).mul(START).to(main), offset) for s in shapes]
    for mode in ("off", "accumulate"):
        up.main_grad, down.main_grad = (fenced(start, offset) for start in starts)  # type: ignore[attr-defined]
        with torch_threads(threads):
            y = expert_mlp(
                x, w, plan_experts(ids, E), *expert_weights(up=up, down=down, transposed=transposed), "swiglu",
                kernels, sink=GradSink(mode),  # type: ignore[arg-type]
            )  # fmt: skip
            y.sum().backward()
        found.append([p.grad if mode == "off" else p.main_grad for p in (up, down)])  # type: ignore[attr-defined]
        up.grad = down.grad = None
    for start, written, added in zip(starts, *found, strict=True):
        assert fences(added).isnan().all()
        expected = start.double() + written.double()
        rounding = 2**-8 * expected.abs() * (main == torch.bfloat16) + 2**-8 * written.abs() * (dtype == torch.bfloat16)
        assert ((added.double() - expected).abs() <= rounding + 1e-6 * (expected.abs() + 1)).all()
        assert written.abs().max() > 1


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("products", INSTRUCTIONS)
def test_the_processor_has_the_bits_of_the_emulation(products: str, case: Case) -> None:
    found = run(kernels_of(products, "own"), case)
    emulation = run(kernels_of(products), case)
    for name, ours in found.items():
        assert torch.equal(ours, emulation[name]), name


@pytest.mark.parametrize(("rows", "hidden"), [(40, 289), (20, 1060), (560, 300)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_delayed_gradients_are_the_same_bits(
    kernels: CompiledKernels, activation: str, rows: int, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [ExpertMLP(E, 40, hidden, activation=activation, dtype=torch.bfloat16, delay_wgrad=d) for d in (False, True)]
    made[1].load_state_dict(made[0].state_dict())
    x, dy = torch.randn(2, rows, 40).bfloat16()
    ids, w = torch.stack((torch.arange(rows) % 2, torch.full((rows,), 3)), 1), torch.rand(rows, 2)
    for module in made:
        monkeypatch.setattr(module.kernels, "on", lambda *where: kernels)
        y = module(x, ids, w)
        y.backward(dy)
        module.backward_dw()
    for name, one in made[0].named_parameters():
        assert torch.equal(one.grad, made[1].get_parameter(name).grad), name


@pytest.mark.parametrize("variant", fused.BUILT_IN)
@pytest.mark.usefixtures("kernels")
def test_however_the_tokens_fall(variant: str) -> None:
    for routing in grid.ROUTINGS:
        for bias, transposed in ((False, False), (True, True)):
            grid.check("cpu", torch.bfloat16, routing, variant, bias, transposed)
    for tokens in (0, 1):
        grid.check("cpu", torch.bfloat16, "random", variant, True, False, tokens=tokens, alignment=8)


@pytest.mark.parametrize(("dim", "hidden"), [(80, 48), (40, 1100), (300, 260)])
@pytest.mark.usefixtures("kernels")
def test_a_row_s_bits_depend_on_that_row_alone(dim: int, hidden: int) -> None:
    fused.test_a_row_s_bits_depend_on_that_row_alone(torch.bfloat16, dim, hidden)


@pytest.mark.usefixtures("kernels")
def test_no_bit_depends_on_the_number_of_threads_or_the_run() -> None:
    one = fused.run(torch.arange(1500), 1, torch.bfloat16)
    for threads in (1, 3):
        again = fused.run(torch.arange(1500), threads, torch.bfloat16)
        assert all(torch.equal(one[name], again[name]) for name in one)


def test_float32_has_the_same_bits_on_all() -> None:
    rows = torch.arange(690, 720)
    plain = fused.run(rows, 1, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        for name in INSTRUCTIONS:
            found = kernels_of(name)
            patch.setattr(fused, "get_backend", lambda name, device, found=found: found)
            other = fused.run(rows, 1, torch.float32)
            assert all(torch.equal(plain[name], other[name]) for name in plain)


def test_the_emulations_are_three_different_kernels() -> None:
    """Nothing was compared with itself: their sums are taken in other orders."""
    rows, found = torch.arange(690, 720), []
    for name in ("widened", *INSTRUCTIONS):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fused, "get_backend", lambda _, device, name=name: kernels_of(name))
            found.append(fused.run(rows, 1, torch.bfloat16)["dw"])
    assert not any(torch.equal(a, b) for a, b in ((found[0], found[1]), (found[1], found[2]), (found[0], found[2])))
