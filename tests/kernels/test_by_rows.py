"""Few rows times a weight whose rows lie one after the other: read there, or brought block by block, the same
bits. They are those of the bfloat16 that a weight in float32 is rounded to, beside rows in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.emulated import emulated
from helpers.threads import torch_threads
from helpers.weights import expert_weights
from trimtab.errors import BackendError
from trimtab.experts.activations import clamped
from trimtab.experts.mlp import expert_mlp
from trimtab.experts.plan import plan_experts
from trimtab.kernels.bf16 import PRODUCTS
from trimtab.kernels.compiled import CompiledKernels

pytestmark = pytest.mark.xdist_group("emulated")  # one process compiles what they share
COUNTS = (1, 2, 0, 17, 32, 33, 64, 65, 128, 129, 3)
WAYS = "1", None
"""Of BROUGHT, see `emulated.DEFINES`."""


def go(way: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BROUGHT", raising=False) if way is None else monkeypatch.setenv("BROUGHT", way)


def test_the_way_is_the_one_that_was_asked_for() -> None:
    with pytest.raises(BackendError, match="nowhere"):
        CompiledKernels(defines=["TRIMTAB_STRAIGHT=nowhere"])


def bits(
    kernels: CompiledKernels, dtype: torch.dtype, dim: int, hidden: int, transposed: bool, plain: bool,
    stored: torch.dtype | None = None,
) -> list[Tensor]:  # fmt: skip
    """Output and gradients. plain: SwiGLU without biases, else gate and up interleaved and biases.

    stored: of the parameters, whatever the products' dtype is.
    """
    g = torch.Generator().manual_seed(dim + hidden)
    ids = torch.repeat_interleave(torch.arange(len(COUNTS)), torch.tensor(COUNTS))
    ids = ids[torch.randperm(len(ids), generator=g)][:, None]

    def leaf(*shape: int, scale: float, dtype: torch.dtype = stored or dtype) -> Tensor:
        return (torch.randn(*shape, generator=g) * scale).to(dtype).requires_grad_()

    x, w = leaf(len(ids), dim, scale=1.0, dtype=dtype), torch.rand(len(ids), 1, generator=g).requires_grad_()
    up, down = (len(COUNTS), 2 * hidden, dim), (len(COUNTS), dim, hidden)
    given = [leaf(e, *((b, a) if transposed else (a, b)), scale=b**-0.5) for e, a, b in (up, down)]
    if not plain:
        given += [leaf(len(COUNTS), width, scale=1.0) for width in (2 * hidden, dim)]
    names = ("up", "down", "up_bias", "down_bias")
    weights = expert_weights(**dict(zip(names, given, strict=False)), transposed=transposed)
    activation = "swiglu" if plain else clamped(1.702, 7.0, 1.0, interleaved=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = expert_mlp(x, w, plan_experts(ids, len(COUNTS)), *weights, activation, kernels)
    y.backward(torch.randn(y.shape, generator=g).to(dtype))
    grads = [t.grad for t in (x, w, *given)]
    return [y, *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize(("plain", "threads"), [(True, 1), (False, 2)], ids=["plain", "biased"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dim", "hidden"), [(64, 96), (420, 31), (40, 1100), (2112, 64), (96, 1120)])
@pytest.mark.parametrize("products", ["float32", *PRODUCTS])
def test_a_weight_brought_either_way_gives_the_same_bits(
    products: str, dim: int, hidden: int, transposed: bool, plain: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest widths have sums of several rounds."""
    dtype = torch.float32 if products == "float32" else torch.bfloat16
    kernels = emulated("widened" if products == "float32" else products)
    found = []
    for way in WAYS:
        go(way, monkeypatch)
        with torch_threads(threads):
            found.append(bits(kernels, dtype, dim, hidden, transposed, plain))
    assert len(found[0]) == (5 if plain else 7)
    for blocks, *others in zip(*found, strict=True):
        assert torch.isfinite(blocks).all()
        assert all(torch.equal(other, blocks) for other in others)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("dim", "hidden", "plain", "threads"), [(64, 96, False, 2), (420, 31, False, 1), (2112, 64, True, 1)]
)
@pytest.mark.parametrize("products", PRODUCTS)
def test_a_weight_in_float32_counts_as_what_it_is_rounded_to(
    products: str, dim: int, hidden: int, transposed: bool, plain: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = emulated(products)
    for way in WAYS:
        go(way, monkeypatch)
        with torch_threads(threads):
            low = bits(kernels, torch.bfloat16, dim, hidden, transposed, plain)
            wide = bits(kernels, torch.bfloat16, dim, hidden, transposed, plain, torch.float32)
        y, dx, dw, *grads = wide
        assert all(torch.equal(mine, true) for mine, true in zip((y, dx, dw), low, strict=False))
        for grad, true in zip(grads, low[3:], strict=True):
            assert grad.dtype == torch.float32
            assert not torch.equal(grad, true.float())
            assert torch.equal(grad.to(true.dtype), true)
