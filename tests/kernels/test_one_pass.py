"""What lies between an expert's products, in one pass of C++: against the formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.comparing import assert_close
from helpers.threads import torch_threads
from trimtab.errors import InputError
from trimtab.experts.activations import GELU, Activation, ClampedSwiGLU, GeGLU, ReluSquared, SwiGLU
from trimtab.experts.mlp_fused import number_of
from trimtab.kernels.compiled import CompiledKernels, compiled_kernels
from trimtab.kernels.hidden import HiddenBack
from trimtab.kernels.loop import LoopKernels

CASES = {
    "swiglu": SwiGLU(), "geglu": GeGLU(), "tanh_geglu": GeGLU("tanh"), "relu_squared": ReluSquared(),
    "gelu": GELU(), "tanh_gelu": GELU("tanh"),
}  # fmt: skip
EXTREMES = torch.tensor([0.0, -0.0, 20.0, -20.0, 89.0, -89.0, 120.0, -120.0, 3e3, -3e3])
NAMES = ("h", "h again", "d_pre", "dw")
Four = tuple[Tensor, Tensor, Tensor, Tensor | None]


def inputs(f: Activation, rows: int, width: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows * 1000 + width)
    pre = torch.randn(rows, width * (2 if f.gated else 1), generator=g) * scale  # type: ignore[attr-defined]
    return pre, torch.randn(rows, width, generator=g), torch.randn(rows, 1, generator=g)


def results(kernels: LoopKernels, f: Activation, pre: Tensor, dh: Tensor, w: Tensor | None) -> Four:
    number = number_of(f)
    back = kernels.hidden_back(f, number, pre, w)
    assert (type(back) is not HiddenBack) == isinstance(kernels, CompiledKernels)
    again, dw = back.hidden(dh.clone())
    d_pre, params = back.pre()
    assert not params
    return kernels.hidden(f, number, pre, w), again, d_pre, dw


def truth(f: Activation, pre: Tensor, dh: Tensor, w: Tensor | None) -> Four:
    """By autograd."""
    pre = pre.double().requires_grad_()
    weight = torch.ones(pre.shape[0], 1).double() if w is None else w.double()
    weight.requires_grad_()
    a, b = (*pre.chunk(2, -1),) if f.gated else (pre, None)  # type: ignore[attr-defined]
    if isinstance(f, SwiGLU):
        h = torch.nn.functional.silu(a) * b
    elif isinstance(f, ReluSquared):
        h = torch.relu(a).square()
    else:
        assert isinstance(f, GELU | GeGLU)
        h = torch.nn.functional.gelu(a, approximate=f.approximate) * (1 if b is None else b)
    h = h * weight
    d_pre, dw = torch.autograd.grad(h, (pre, weight), dh.double())
    return h.detach(), h.detach(), d_pre, None if w is None else dw[:, 0]


def compare(ours: Four, true: Four, dh: Tensor, w: Tensor, what: str) -> None:
    for name, a, b in zip(NAMES[:3], ours, true, strict=False):
        assert a is not None
        assert b is not None
        assert_close(a, b.where(b.abs() > 1e-30, 0), 2e-6, f"{name} of {what}")
    if true[3] is None:
        assert ours[3] is None
    else:
        assert ours[3] is not None
        # A sum may cancel: an error counts against what was summed.
        largest = (true[0] / w.double() * dh).abs().sum(1).amax() if dh.shape[0] else 0.0
        assert ((ours[3] - true[3]).abs() <= 2e-6 * largest + 1e-30).all(), f"{NAMES[3]} of {what}"


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("weighted", [True, False])
def test_any_number_of_rows_of_any_width(name: str, weighted: bool) -> None:
    f = CASES[name]
    for rows in (0, 1, 5, 67):
        for width in (1, 2, 3, 7, 15, 16, 17, 31, 32, 48, 65, 333):
            pre, dh, w = inputs(f, rows, width)
            ours = results(compiled_kernels(), f, pre, dh, w if weighted else None)
            true = truth(f, pre, dh, w if weighted else None)
            compare(ours, true, dh, w, f"{rows} rows of {width}")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", CASES)
def test_values_whose_exponential_overflows(name: str) -> None:
    """Each value by itself, for beside the largest an error of the others would not be seen."""
    f = CASES[name]
    for value in EXTREMES.tolist():
        pre, dh, w = inputs(f, 3, 19)
        pre[:, :19] = value
        pre[1] = value
        ours, true = results(compiled_kernels(), f, pre, dh, w), truth(f, pre, dh, w)
        compare(ours, true, dh, w, f"values of {value}")


@pytest.mark.parametrize("gate", [-1e20, -3e38])
def test_a_gate_far_below_zero_is_shut(gate: float) -> None:
    pre, dh, w = inputs(SwiGLU(), 3, 19)
    pre[:, :19] = gate
    h, again, d_pre, dw = results(compiled_kernels(), SwiGLU(), pre, dh, w)
    assert dw is not None
    assert all(torch.equal(t, torch.zeros_like(t)) for t in (h, again, d_pre, dw))


@pytest.mark.parametrize("far", [-1e38, -1e36, 1e36, 1e38])
@pytest.mark.parametrize("f", [GELU(), GeGLU()])
def test_far_from_zero_gelu_is_straight(f: Activation, far: float) -> None:
    pre, dh, w = torch.ones(3, 19 * (1 + isinstance(f, GeGLU))), torch.ones(3, 19), torch.ones(3, 1)
    pre[:, :19] = far
    d_pre = results(compiled_kernels(), f, pre, dh, w)[2]
    assert torch.equal(d_pre[:, :19], torch.full_like(dh, float(far > 0)))


@pytest.mark.parametrize("name", CASES)
def test_no_bit_depends_on_the_other_rows_or_on_the_number_of_threads(name: str) -> None:
    f = CASES[name]
    pre, dh, w = inputs(f, 101, 83)
    runs = []
    for threads in (1, 2, 3, 8):
        with torch_threads(threads):
            runs.append(results(compiled_kernels(), f, pre, dh, w))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True) if a is not None and b is not None)
    alone = results(compiled_kernels(), f, pre[40:43], dh[40:43], w[40:43])
    assert all(torch.equal(a, b[40:43]) for a, b in zip(alone, runs[0], strict=True) if a is not None and b is not None)


def test_nan_stays_in_its_row() -> None:
    for f in CASES.values():
        pre, dh, w = inputs(f, 9, 35)
        clean = results(compiled_kernels(), f, pre, dh, w)
        pre[4] = torch.nan
        spoilt = results(compiled_kernels(), f, pre, dh, w)
        for a, b in zip(clean, spoilt, strict=True):
            assert a is not None
            assert b is not None
            assert b[4].isnan().all()
            assert torch.equal(a[:4], b[:4])
            assert torch.equal(a[5:], b[5:])


def test_what_is_not_covered_takes_the_formulas() -> None:
    kernels, loop = compiled_kernels(), LoopKernels()
    pre, dh, w = inputs(SwiGLU(), 6, 20)

    class Own(SwiGLU):
        pass

    strided = torch.cat((pre, pre), 1)[:, :40]
    cases: tuple[tuple[Activation, Tensor, Tensor, Tensor], ...] = (
        (ClampedSwiGLU(), pre, dh, w), (Own(), pre, dh, w), (SwiGLU(), pre.double(), dh.double(), w.double()),
        (SwiGLU(), strided, dh, w), (SwiGLU(), pre, dh, w.expand(6, 20)),
    )  # fmt: skip
    for f, each, d, weight in cases:
        number = number_of(f)
        back, theirs = (k.hidden_back(f, number, each, weight) for k in (kernels, loop))
        assert type(back) is HiddenBack
        assert all(torch.equal(a, b) for a, b in zip(back.hidden(d.clone()), theirs.hidden(d.clone()), strict=True))
        assert torch.equal(back.pre()[0], theirs.pre()[0])
        assert torch.equal(kernels.hidden(f, number, each, weight), loop.hidden(f, number, each, weight))


def test_a_gradient_of_another_shape_is_refused() -> None:
    pre, dh, w = inputs(SwiGLU(), 6, 20)
    for wrong in (dh[:5], dh[:, :19], dh.double()):
        with pytest.raises(InputError, match="of hidden rows"):
            compiled_kernels().hidden_back(SwiGLU(), 0, pre, w).hidden(wrong)


def test_a_gradient_of_any_strides_is_taken() -> None:
    pre, _, w = inputs(SwiGLU(), 6, 20)
    dense = compiled_kernels().hidden_back(SwiGLU(), 0, pre, w).hidden(torch.ones(6, 20))
    spread = compiled_kernels().hidden_back(SwiGLU(), 0, pre, w).hidden(torch.ones(1).expand(6, 20))
    assert all(torch.equal(a, b) for a, b in zip(dense, spread, strict=True) if a is not None and b is not None)
