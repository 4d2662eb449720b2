"""An MoE layer with known parameters, and what the float64 oracle says of its output and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.comparing import assert_close
from helpers.pair_truth import TRUTHS
from helpers.router_truth import truth_losses, truth_weights
from trimtab import oracle
from trimtab.dispatch.all_to_all import AllToAll
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.options import CombineMode
from trimtab.moe import MoE, MoEConfig, MoEOutput
from trimtab.routing.config import RouterConfig

D, HIDDEN, E, K = 16, 12, 6, 3
Inputs = tuple[Tensor, Tensor | None, Tensor | None]
"""x, mask, ids."""
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}
SHAPES = [(b, n) for b in (1, 3) for n in (1, 3, 8, 17)] + [(17,), (0,), (3, 0), (0, 5), (2, 1, 3)]


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


def parted(moe: MoE, combine: CombineMode = "sum") -> MoE:
    """The layer, left with this rank's experts of all."""
    experts, share = moe.experts, own_share()
    for name, param in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(param.detach()[share].clone()))
    experts.num_experts = share.stop - share.start
    moe.dispatcher = Dispatcher(E, AllToAll(dist.group.WORLD), combine=combine, layer=moe.dispatcher.layer)
    return moe


def own_share() -> slice:
    rank, e = dist.get_rank(), E // dist.get_world_size()
    return slice(rank * e, rank * e + e)


def parted_results(whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """`results` of the whole layer on each rank, as the parted one has them: an expert sees the rows of all ranks."""
    for name in whole:
        if "experts" in name:
            dist.all_reduce(whole[name])
            whole[name] = whole[name][own_share()]
    return whole


def truth(moe: MoE, p: dict[str, Tensor], x: Tensor, ids: Tensor, mask: Tensor | None) -> Tensor:
    """The layer's output [T, D] from float64 parameters `p`, for the ids that it chose."""
    activation = TRUTHS[moe.config.activation]
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


def assert_true(ours: dict[str, Tensor], moe: MoE, given: Inputs, dtype: torch.dtype) -> None:
    """Output and every gradient as the float64 oracle's, for the ids that were chosen."""
    x, mask, _ = given
    c, mask_T = moe.config.router, torch.ones(x.shape[:-1], dtype=torch.bool) if mask is None else mask
    true_x = x.double().masked_fill(~mask_T[..., None], 0).flatten(0, -2).requires_grad_()
    mask_T, ids = mask_T.flatten(), ours["ids"]
    p = {name: param.detach().double().requires_grad_() for name, param in moe.named_parameters()}
    y = truth(moe, p, true_x, ids, mask_T)
    total = (y * slope(ours["y"]).flatten(0, -2).double()).sum()
    factors = {"aux": c.aux_loss, "sequence_aux": c.sequence_aux_loss, "z": c.z_loss}
    batch = x.shape[0] if x.dim() > 2 else 1
    # Before any of them is dropped for want of capacity.
    chosen = ids if c.capacity_factor is None else moe.router(x.flatten(0, -2), token_mask_T=mask_T).ids_TK
    losses = truth_losses(true_x @ p["router.weight"].T, chosen, mask_T, batch, c)
    for name in ours.keys() & factors.keys():
        assert_close(ours[name], losses[name] * factors[name], BOUNDS[dtype], name)
        total = total + losses[name] * factors[name]
    true = torch.autograd.grad(total, [true_x, *p.values()], allow_unused=True, materialize_grads=True)
    assert_close(ours["y"].flatten(0, -2), y, BOUNDS[dtype], "y")
    for name, grad in zip(("dx", *p), true, strict=True):
        assert_close(ours[name].view(grad.shape), grad, BOUNDS[dtype], name)


def check(moe: MoE, dtype: torch.dtype, shape: tuple[int, ...], mask: Tensor | None = None) -> MoEOutput:
    """Random tokens through the layer; its output."""
    g = torch.Generator().manual_seed(sum(shape) + 1)
    x = torch.randn(*shape, D, generator=g, dtype=torch.float64).to(dtype)
    given = (x if mask is None else x.masked_fill(~mask[..., None], float("nan"))), mask, None
    outs: list[MoEOutput] = []

    def forward(x: Tensor, **more: Any) -> MoEOutput:
        outs.append(moe(x, **more))
        return outs[0]

    found = results(forward, moe, given)
    assert outs[0].y.shape == x.shape
    assert outs[0].y.dtype == dtype
    assert_true(found, moe, given, dtype)
    ids = found["ids"]
    assert found["loads"].tolist() == torch.bincount(ids[ids >= 0], minlength=E).tolist()
    return outs[0]
