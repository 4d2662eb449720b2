"""An MoE layer with known parameters, and what the float64 oracle says of its output and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.comparing import assert_close, cut
from helpers.router_truth import truth_losses, truth_weights
from trimtab import oracle
from trimtab.moe import MoE, MoEConfig, MoEOutput
from trimtab.routing.config import RouterConfig

D, HIDDEN, E, K = 16, 12, 6, 3
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}
SHAPES = [(b, n) for b in (1, 3) for n in (1, 3, 8, 17)] + [(17,), (0,), (3, 0), (0, 5), (2, 1, 3)]


def clamped_swiglu(pre: Tensor) -> Tensor:
    gate, up = pre.chunk(2, -1)
    gate, up = cut(gate, 7.0), cut(up, 7.0, -7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": oracle.swiglu,
    "geglu": lambda pre: F.gelu(pre.chunk(2, -1)[0]) * pre.chunk(2, -1)[1],
    "clamped_swiglu": clamped_swiglu,
    "relu_squared": lambda pre: torch.relu(pre).square(),
    "gelu": F.gelu,
}


def build(dtype: torch.dtype = torch.float32, layer: str = "moe", **more: Any) -> MoE:
    router = RouterConfig(**{"num_experts": E, "top_k": K} | more.pop("router", {}))
    moe = MoEConfig(**{"dim": D, "hidden": HIDDEN, "router": router, "dtype": dtype} | more).build(layer)
    g = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for p in moe.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64) / p.shape[-1] ** 0.5)
        if moe.router.expert_bias is not None:
            moe.router.expert_bias.copy_(torch.randn(E, generator=g))
    return moe


def truth(moe: MoE, p: dict[str, Tensor], x: Tensor, ids: Tensor, mask: Tensor | None) -> Tensor:
    """The layer's output [T, D] from float64 parameters `p`, for the ids that it chose."""
    activation = ACTIVATIONS[moe.config.activation]
    w = truth_weights(x @ p["router.weight"].T, ids, moe.config.router)
    sent = x @ p["to_latent.weight"].T if moe.config.latent_dim else x
    up = moe.experts.parameter_names[0]
    y = oracle.moe(
        sent, ids, w, p[f"experts.{up}"], p["experts.down"],
        up_bias_EI=p.get(f"experts.{up}_bias"), down_bias_ED=p.get("experts.down_bias"),
        activation=activation, token_mask_T=mask,
    )  # fmt: skip
    y = y @ p["from_latent.weight"].T if moe.config.latent_dim else y
    if moe.shared is not None:
        shared = activation(x @ p["shared.up.weight"].T) @ p["shared.down.weight"].T
        y = y + (shared if moe.shared.gate is None else shared * torch.sigmoid(x @ p["shared.gate.weight"].T))
    return y


def check(moe: MoE, dtype: torch.dtype, shape: tuple[int, ...], mask: Tensor | None = None) -> MoEOutput:
    g = torch.Generator().manual_seed(sum(shape) + 1)
    x = torch.randn(*shape, D, generator=g, dtype=torch.float64).to(dtype)
    true_x = x.flatten(0, -2).double()
    if mask is not None:
        x = x.masked_fill(~mask[..., None], float("nan"))
        true_x = true_x.masked_fill(~mask.flatten()[:, None], 0)
    x.requires_grad_()
    true_x.requires_grad_()
    moe.zero_grad()
    out = moe(x, token_mask=mask)
    losses = list(out.losses.values())
    dy = torch.randn(out.y.shape, generator=g, dtype=torch.float64).to(dtype)
    torch.autograd.backward([out.y, *losses], [dy, *(torch.ones_like(loss) for loss in losses)])
    p = {name: param.detach().double().requires_grad_() for name, param in moe.named_parameters()}
    c, mask_T = moe.config.router, torch.ones(true_x.shape[0], dtype=torch.bool) if mask is None else mask.flatten()
    ids = out.ids_TK[:, : c.top_k] if c.pad else out.ids_TK  # padding has the weight 0
    y = truth(moe, p, true_x, ids, mask_T)
    total = (y * dy.flatten(0, -2).double()).sum()
    if losses:
        coefficients = {"aux": c.aux_loss, "sequence_aux": c.sequence_aux_loss, "z": c.z_loss}
        batch = shape[0] if len(shape) > 1 else 1
        logits = true_x @ p["router.weight"].T
        chosen = truth_losses(logits, moe.router(x.flatten(0, -2), token_mask_T=mask_T).ids_TK, mask_T, batch, c)
        total = total + sum(chosen[name] * coefficients[name] for name in out.losses)
    true = torch.autograd.grad(total, [true_x, *p.values()], allow_unused=True, materialize_grads=True)
    assert out.y.shape == x.shape
    assert out.y.dtype == dtype
    bound = BOUNDS[dtype]
    assert_close(out.y.flatten(0, -2), y, bound, "y")
    assert_close(x.grad.flatten(0, -2), true[0], bound, "dx")
    for (name, param), true_grad in zip(moe.named_parameters(), true[1:], strict=True):
        assert param.grad is not None, name
        assert_close(param.grad, true_grad, bound, name)
    assert out.loads_E.tolist() == torch.bincount(ids[ids >= 0], minlength=E).tolist()
    return out
