"""One layer run eagerly and compiled: outputs, losses, loads and every gradient of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo as dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from helpers.comparing import assert_close
from helpers.layer_case import BOUNDS, D, E, K, truth
from helpers.router_truth import truth_losses
from trimtab.moe import MoE, MoEOutput

Inputs = tuple[Tensor, Tensor | None, Tensor | None]


def inputs(shape: tuple[int, ...], dtype: torch.dtype, *, masked: bool = False, replay: bool = False) -> Inputs:
    """x, with NaN where the mask is False; a mask or None; ids, some of them dropped, or None."""
    g = torch.Generator().manual_seed(sum(shape) + len(shape))
    x = torch.randn(*shape, D, generator=g, dtype=torch.float64).to(dtype)
    mask = torch.rand(shape, generator=g) < 0.7 if masked else None
    if mask is not None:
        x = x.masked_fill(~mask[..., None], float("nan"))
    ids = torch.rand(*shape, E, generator=g).argsort(-1)[..., :K] if replay else None
    if ids is not None:
        ids = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.2, -1)
    return x, mask, ids


def any_count(given: Inputs) -> Inputs:
    """The same, marked so that one graph serves every number of tokens, 0 and 1 among them."""
    for t in given:
        if t is not None:
            dynamo.decorators.mark_unbacked(t, 0, shape_id="tokens")
    return given


def slope(y: Tensor) -> Tensor:
    """The gradient of the output in every test: random, and the same for the same shape."""
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(y.shape[0]), dtype=torch.float64).to(y.dtype)


def loss_of(out: MoEOutput) -> Tensor:
    return (out.y * slope(out.y)).float().sum() + sum(out.losses.values(), torch.zeros(()))


def results(
    forward: Callable[..., MoEOutput], moe: MoE, given: Inputs, mark: Callable[[Inputs], Inputs] | None = None
) -> dict[str, Tensor]:
    """All that a forward and a backward give, by name; the step's loads last, which this ends."""
    x, mask, ids = (None if t is None else t.clone() for t in given)
    assert x is not None
    x.requires_grad_()
    if mark is not None:
        mark((x, mask, ids))
    moe.zero_grad()
    out = forward(x, token_mask=mask, ids=ids)
    loss_of(out).backward()
    found = {"y": out.y, "dx": x.grad, "loads": out.loads_E, "ids": out.ids_TK} | out.losses
    found |= {name: p.grad for name, p in moe.named_parameters()}
    assert all(t is not None for t in found.values()), [name for name, t in found.items() if t is None]
    return {name: t.detach().clone() for name, t in found.items() if t is not None} | {
        "counted": moe.router.take_loads()
    }


def assert_same(ours: dict[str, Tensor], eager: dict[str, Tensor], bound: float) -> None:
    assert ours.keys() == eager.keys()
    for name, value in eager.items():
        assert ours[name].dtype == value.dtype, name
        if value.is_floating_point():
            assert_close(ours[name], value, bound, name)
        else:
            assert torch.equal(ours[name], value), name


def assert_true(ours: dict[str, Tensor], moe: MoE, given: Inputs, dtype: torch.dtype) -> None:
    """Output and every gradient as the float64 oracle's, for the ids that were chosen."""
    x, mask, _ = given
    c, mask_T = moe.config.router, torch.ones(x.shape[:-1], dtype=torch.bool) if mask is None else mask
    true_x = x.double().masked_fill(~mask_T[..., None], 0).flatten(0, -2).requires_grad_()
    mask_T, ids = mask_T.flatten(), ours["ids"][:, : c.top_k] if c.pad else ours["ids"]
    p = {name: param.detach().double().requires_grad_() for name, param in moe.named_parameters()}
    y = truth(moe, p, true_x, ids, mask_T)
    total = (y * slope(ours["y"]).flatten(0, -2).double()).sum()
    factors = {"aux": c.aux_loss, "sequence_aux": c.sequence_aux_loss, "z": c.z_loss}
    batch = x.shape[0] if x.dim() > 2 else 1
    losses = truth_losses(true_x @ p["router.weight"].T, ids, mask_T, batch, c)
    for name in ours.keys() & factors.keys():
        assert_close(ours[name], losses[name] * factors[name], BOUNDS[dtype], name)
        total = total + losses[name] * factors[name]
    true = torch.autograd.grad(total, [true_x, *p.values()], allow_unused=True, materialize_grads=True)
    assert_close(ours["y"].flatten(0, -2), y, BOUNDS[dtype], "y")
    for name, grad in zip(("dx", *p), true, strict=True):
        assert_close(ours[name].view(grad.shape), grad, BOUNDS[dtype], name)


def compiled(moe: MoE, backend: str = "aot_eager", **options: Any) -> tuple[Callable[..., MoEOutput], Any]:
    """The layer without a graph break, and what counts its graphs (`frame_count`)."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(moe, fullgraph=True, backend=counter, **options), counter
