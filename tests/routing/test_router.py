"""What holds for every router: drawn configs, sizes and masks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab.routing.balance import update_bias
from trimtab.routing.config import GROUP_SCORES, RouterConfig
from trimtab.routing.router import Router
from trimtab.routing.scores import SCORES
from trimtab.routing.select import SELECTS

D = 5


@st.composite
def configs(draw: st.DrawFn) -> RouterConfig:
    select = draw(st.sampled_from(list(SELECTS)))
    groups, top_groups = draw(st.sampled_from([(1, 1), (2, 1), (3, 2)])) if select == "topk" else (1, 1)
    num_experts = groups * draw(st.integers(2, 4))
    capacity = draw(st.sampled_from([None, 0.5, 1.0, 2.0]))
    return RouterConfig(
        num_experts=num_experts, top_k=draw(st.integers(1, top_groups * num_experts // groups)),
        score=draw(st.sampled_from(list(SCORES))), normalize=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])), groups=groups, top_groups=top_groups,
        group_score=draw(st.sampled_from(GROUP_SCORES)), bias=select == "topk" and draw(st.booleans()), select=select,
        aux_loss=0.1, sequence_aux_loss=0.1, global_aux_loss=0.1, z_loss=0.1, capacity_factor=capacity,
        drop=draw(st.sampled_from(["probability", "position"])), jitter=draw(st.sampled_from([0.0, 0.1])),
    )  # fmt: skip


class NoHostSync(TorchDispatchMode):
    """Raises where the host would have to wait for a value of a device: data-dependent shapes and scalars."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(i is not None and i.dtype == torch.bool for i in args[1])
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal"), name
        assert not by_mask, f"{name} by a mask"
        return func(*args, **kwargs or {})


@contextmanager
def unread() -> Iterator[None]:
    """Ways to read a tensor that a dispatch mode does not see where the tensor is on the CPU already."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "numpy", "cpu", "__array__"):
            patch.setattr(torch.Tensor, name, Mock(side_effect=AssertionError("read by the host")))
        yield


@settings(deadline=None, max_examples=40)
@given(configs())
def test_nothing_is_read_back_to_the_host(c: RouterConfig) -> None:
    router = Router(c, D)
    real = torch.tensor([True, True, False, True])
    x = torch.randn(4, D, requires_grad=True)
    with NoHostSync(), unread():
        out = router(x, token_mask_T=real, batch=2)
        torch.autograd.grad(sum(router.losses(out).values()) + out.weights_TK.sum(), (x, router.weight))
        update_bias(router)


@settings(deadline=None, max_examples=150)
@given(configs(), st.integers(0, 3), st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0]), st.booleans())
def test_every_decision(c: RouterConfig, batch: int, length: int, masked: float, training: bool) -> None:
    g = torch.Generator().manual_seed(batch * 7 + length)
    tokens = batch * length
    router = Router(c, D).train(training)
    router.generator = torch.Generator().manual_seed(0)
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.randn(c.num_experts, generator=g))
    real = torch.rand(tokens, generator=g) >= masked
    x = torch.randn(tokens, D, generator=g).masked_fill(~real[:, None], float("nan")).requires_grad_()
    out = router(x, token_mask_T=real, batch=batch)
    ids, weights = out.ids_TK, out.weights_TK
    assert ids.shape == weights.shape
    assert ids.dtype == torch.int64
    assert ((ids >= -1) & (ids < c.num_experts)).all()
    assert weights.isfinite().all()
    assert (weights >= 0).all()
    assert (weights[ids < 0] == 0).all()
    assert (ids[~real] == -1).all()
    for row in ids.tolist():
        kept = [e for e in row if e >= 0]
        assert len(set(kept)) == len(kept) <= c.num_experts
    if c.select != "expert_choice" and c.capacity_factor is None:
        assert (ids[real] >= 0).all()
        if c.normalize:
            assert torch.allclose(weights[real].sum(1), torch.tensor(c.scale), rtol=1e-5)
    assert out.loads_E.tolist() == torch.bincount(ids[ids >= 0], minlength=c.num_experts).tolist()
    total: Any = sum(router.losses(out).values()) + weights.sum()
    dx, dw = torch.autograd.grad(total, (x, router.weight))
    assert dx.isfinite().all()
    assert dw.isfinite().all()
    assert (dx[~real] == 0).all()
    again = router(x, token_mask_T=real, ids_TK=ids, batch=batch)
    assert torch.equal(again.ids_TK, ids)
