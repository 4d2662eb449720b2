"""The factor by which gradients are clipped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trimtab.parallel.clip import clip_grad_norm_


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [0.37, 10_000.0])
def test_it_is_one_for_gradients_of_all_dtypes_and_is_rounded_once(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.zeros(4_000, dtype=dtype)), nn.Parameter(torch.zeros(4_000))]
    drawn = [(scale * torch.randn_like(p)).detach() for p in params]
    for p, g in zip(params, drawn, strict=True):
        p.grad = g.clone()
    norm = clip_grad_norm_(params, 1.0)
    assert norm > 1
    true = [g.double() / torch.cat([d.double() for d in drawn]).norm() for g in drawn]
    for p, want in zip(params, true, strict=True):
        bound = max(torch.finfo(p.dtype).eps / 2, 2e-7)
        torch.testing.assert_close(p.grad.double(), want, rtol=bound, atol=torch.finfo(torch.float16).tiny / 1024)
