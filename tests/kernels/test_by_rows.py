"""Few rows times a weight whose rows lie one after the other: brought row by row or block by block, the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from threads import torch_threads
from trimtab.dispatch.plan import plan_experts
from trimtab.experts.expert_call import ExpertMath, ExpertWeights
from trimtab.experts.mlp import expert_mlp
from trimtab.experts.mlp_fused import FusedMLP
from trimtab.kernels.compiled import CompiledKernels

COUNTS = (1, 2, 0, 17, 32, 33, 64, 65, 128, 129, 3)


def bits(kernels: CompiledKernels, dtype: torch.dtype, dim: int, hidden: int, transposed: bool) -> list[Tensor]:
    """Output and gradients."""
    g = torch.Generator().manual_seed(dim + hidden)
    ids = torch.repeat_interleave(torch.arange(len(COUNTS)), torch.tensor(COUNTS))
    ids = ids[torch.randperm(len(ids), generator=g)][:, None]

    def leaf(*shape: int, scale: float) -> Tensor:
        return (torch.randn(*shape, generator=g) * scale).to(dtype).requires_grad_()

    x, w = leaf(len(ids), dim, scale=1.0), torch.rand(len(ids), 1, generator=g).requires_grad_()
    up, down = (len(COUNTS), 2 * hidden, dim), (len(COUNTS), dim, hidden)
    given = [leaf(e, *((b, a) if transposed else (a, b)), scale=b**-0.5) for e, a, b in (up, down)]
    weights = ExpertWeights(up=given[0], down=given[1], transposed=transposed)
    y = expert_mlp(x, w, plan_experts(ids, len(COUNTS)), weights, ExpertMath(), kernels)
    assert isinstance(y.grad_fn, FusedMLP._backward_cls)
    y.backward(torch.randn(y.shape, generator=g).to(dtype))
    grads = [t.grad for t in (x, w, *given)]
    return [y, *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dim", "hidden"), [(64, 96), (420, 31), (700, 288)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_brought_either_way_gives_the_same_bits(
    dtype: torch.dtype, dim: int, hidden: int, transposed: bool, threads: int
) -> None:
    with torch_threads(threads):
        blocks, rows = (
            bits(CompiledKernels(defines=[f"TRIMTAB_BY_ROWS={way}"]), dtype, dim, hidden, transposed) for way in (0, 1)
        )
    assert len(rows) == 5
    for a, b in zip(blocks, rows, strict=True):
        assert torch.equal(a, b)
        assert torch.isfinite(a).all()
