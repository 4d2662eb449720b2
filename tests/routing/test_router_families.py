"""The layer as transformers' own MoE blocks compute it: a second truth, written by others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from helpers.comparing import assert_close
from trimtab.moe import MoEConfig
from trimtab.routing.config import RouterConfig

D, F, E, K, B, L = 16, 12, 8, 3, 2, 9


def mixtral() -> tuple[nn.Module, MoEConfig]:
    theirs = MixtralConfig(hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=K)
    return MixtralSparseMoeBlock(theirs), MoEConfig(
        dim=D, hidden=F, router=RouterConfig(num_experts=E, top_k=K, normalize=True)
    )


def qwen2() -> tuple[nn.Module, MoEConfig]:
    theirs = Qwen2MoeConfig(
        hidden_size=D, moe_intermediate_size=F, num_experts=E, num_experts_per_tok=K, norm_topk_prob=False,
        shared_expert_intermediate_size=10,
    )  # fmt: skip
    router = RouterConfig(num_experts=E, top_k=K)
    return Qwen2MoeSparseMoeBlock(theirs), MoEConfig(dim=D, hidden=F, router=router, shared_hidden=10, shared_gate=True)


def deepseek() -> tuple[nn.Module, MoEConfig]:
    theirs = DeepseekV3Config(
        hidden_size=D, moe_intermediate_size=F, n_routed_experts=E, num_experts_per_tok=K, n_group=4, topk_group=2,
        norm_topk_prob=True, routed_scaling_factor=2.5, n_shared_experts=2,
    )  # fmt: skip
    router = RouterConfig(
        num_experts=E, top_k=K, score="sigmoid", normalize=True, scale=2.5, groups=4, top_groups=2, bias=True
    )
    return DeepseekV3MoE(theirs), MoEConfig(dim=D, hidden=F, router=router, shared_hidden=2 * F)


def pairs(theirs: Any, ours: Any) -> list[tuple[str, Tensor, list[Tensor]]]:
    """(name, our parameter, theirs, put together along dim 0)."""
    found = [
        ("router", ours.router.weight, [theirs.gate.weight]),
        ("up", ours.experts.gate_up, [theirs.experts.gate_up_proj]),
        ("down", ours.experts.down, [theirs.experts.down_proj]),
    ]
    shared = getattr(theirs, "shared_experts", None) or getattr(theirs, "shared_expert", None)
    if shared is not None:
        found.append(("shared up", ours.shared.up.weight, [shared.gate_proj.weight, shared.up_proj.weight]))
        found.append(("shared down", ours.shared.down.weight, [shared.down_proj.weight]))
    if hasattr(theirs, "shared_expert_gate"):
        found.append(("shared gate", ours.shared.gate.weight, [theirs.shared_expert_gate.weight]))
    return found


@pytest.mark.parametrize("family", [mixtral, qwen2, deepseek])
def test_blocks(family: Any) -> None:
    theirs, config = family()
    ours = config.build()
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, mine, parts in pairs(theirs, ours):
            for part in parts:
                part.copy_(torch.randn(part.shape, generator=g) / part.shape[-1] ** 0.5)
            mine.copy_(torch.cat(parts).view_as(mine))
        if ours.router.expert_bias is not None:
            ours.router.expert_bias.copy_(torch.randn(E, generator=g) / 4)
            theirs.gate.e_score_correction_bias.copy_(ours.router.expert_bias)
    x = torch.randn(B, L, D, generator=g)
    dy = torch.randn(B, L, D, generator=g)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, true = ours(a).y, theirs(b)
    y.backward(dy)
    true.backward(dy)
    assert_close(y, true, 5e-6, "y")
    assert_close(a.grad, b.grad, 5e-6, "dx")
    for name, mine, parts in pairs(theirs, ours):
        assert_close(mine.grad, torch.cat([part.grad for part in parts]).view_as(mine), 5e-6, name)


def test_sqrtsoftplus_is_deepseek_v4s() -> None:
    theirs = DeepseekV4TopKRouter(
        DeepseekV4Config(hidden_size=D, num_local_experts=E, num_experts_per_tok=K, scoring_func="sqrtsoftplus")
    )
    scale = theirs.routed_scaling_factor
    ours = RouterConfig(num_experts=E, top_k=K, score="sqrtsoftplus", normalize=True, scale=scale, bias=True).build(D)
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight)
        ours.expert_bias.copy_(torch.randn(E, generator=g))
        theirs.e_score_correction_bias.copy_(ours.expert_bias)
    x = torch.randn(L, D, generator=g)
    out, (_, weights, ids) = ours(x), theirs(x)
    dense = [torch.zeros(L, E).scatter(1, i, w.detach()) for i, w in ((out.ids_TK, out.weights_TK), (ids, weights))]
    assert_close(dense[0], dense[1], 2e-6, "weights")


def test_the_aux_loss_is_transformers_over_k() -> None:
    """Theirs is K where the load is even, ours is 1."""
    router = RouterConfig(num_experts=E, top_k=K, aux_loss=1.0).build(D)
    mask = torch.rand(B, L) < 0.7
    out = router(torch.randn(B * L, D), token_mask_T=mask.flatten(), batch=B)
    true = load_balancing_loss_func((out.logits_TE,), E, K, mask)
    assert_close(router.losses(out)["aux"], true / K, 2e-6, "aux")
