"""Logits of a router on CUDA: float32 whatever the setting for TF32 is, for no product is one of float32.

Legend: T tokens, D model dim, E experts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.comparing import assert_close
from trimtab.routing import scores

T, D, E = 37, 256, 24
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Products(TorchDispatchMode):
    """The dtypes of each product's operands and of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.found.append([t.dtype for t in (*args, out) if isinstance(t, Tensor)])
        return out


@pytest.mark.parametrize("weight", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_product_on_cuda_is_one_that_tf32_rounds(dtype: torch.dtype, weight: torch.dtype) -> None:
    with FakeTensorMode(), Products() as products:
        x, w = torch.empty(T, D, dtype=dtype, device="cuda"), torch.empty(E, D, dtype=weight, device="cuda")
        logits = scores.router_logits(x, w)
    assert (logits.shape, logits.dtype) == ((T, E), torch.float32)
    assert products.found == [[torch.bfloat16, torch.bfloat16, torch.float32]]


@pytest.mark.parametrize("weight", DTYPES, ids=str)
def test_a_graph_of_it_takes_any_number_of_tokens(weight: torch.dtype) -> None:
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])  # type: ignore[var-annotated]
    mode = FakeTensorMode(shape_env=(env := ShapeEnv()))
    tokens = mode.from_tensor(torch.empty(T), symbolic_context=dynamic).shape[0]
    with mode:
        x, w = (
            torch.empty(tokens, D, dtype=torch.bfloat16, device="cuda"),
            torch.empty(E, D, dtype=weight, device="cuda"),
        )
        assert scores.exact_product(x, w).shape == (tokens, E)
    assert not env.replacements


@pytest.mark.parametrize("weight", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_as_exact_as_a_product_of_float32(
    dtype: torch.dtype, weight: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With sums in float32, as tensor cores make them, of exact products."""
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(T, D, generator=g).to(dtype), (torch.randn(E, D, generator=g) * D**-0.5).to(weight)
    assert_close(scores.exact_product(x, w), x.double() @ w.double().T, 2e-6, "logits")
    assert scores.exact_product(x[:0], w).shape == (0, E)
    x[3] = torch.nan
    x[3], x[4, 1], x[5, 2], w[7], w[8, 3] = torch.nan, torch.inf, -torch.inf, 0.5, torch.inf
    got, truth = scores.exact_product(x, w).double(), x.double() @ w.double().T
    finite = truth.isfinite()
    torch.testing.assert_close(got[~finite], truth[~finite], rtol=0, atol=0, equal_nan=True)
    assert_close(got[finite], truth[finite], 2e-6, "beside logits that are not finite")


def test_the_parts_of_a_number_are_it() -> None:
    t = torch.cat((torch.randn(4096), torch.randn(4096) * 1e-30, torch.randn(4096) * 1e30, torch.zeros(1)))
    assert torch.equal(scores._parts(t).double().sum(0), t.double())
    half = t[:4096].half()
    assert torch.equal(scores._parts(half).double().sum(0), half.double())
