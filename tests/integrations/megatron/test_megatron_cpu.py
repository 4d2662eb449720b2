"""Megatron's own MoE layer runs on ranks without a GPU, as it is, and is right where its tokens are even.

Legend: L positions, B sequences, H model dim, E experts, e experts of a rank, F hidden dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.megatron_cpu import built, megatron_ranks, parallel_state
from trimtab.oracle import moe

HIDDEN, FFN, EXPERTS, TOP_K = 16, 8, 4, 2


def build(dispatcher: str, ep: int) -> Any:
    """Megatron's layer, its weights drawn alike on all ranks."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, num_moe_experts=EXPERTS, moe_ffn_hidden_size=FFN,
        moe_router_topk=TOP_K, moe_router_pre_softmax=True, moe_router_load_balancing_type="none",
        moe_token_dispatcher_type=dispatcher, expert_model_parallel_size=ep, add_bias_linear=False,
        gated_linear_unit=True, activation_func=F.silu, use_cpu_initialization=True,
    )  # fmt: skip
    spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)
    return built(spec, config=config, layer_number=1)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def step(dispatcher: str, ep: int) -> dict[str, float]:
    """By how much each of a step's results is off on this rank."""
    rank = parallel_state.get_data_parallel_rank()
    layer = build(dispatcher, ep)
    router, up = drawn(EXPERTS, HIDDEN), drawn(EXPERTS, 2 * FFN, HIDDEN)
    down = drawn(EXPERTS, HIDDEN, FFN)
    mine = slice(rank * EXPERTS // ep, (rank + 1) * EXPERTS // ep)
    found: dict[str, tuple[Any, Tensor]] = {}
    with torch.no_grad():
        layer.router.weight.copy_(router)
        for expert, first, second in zip(layer.experts.local_experts, up[mine], down[mine], strict=True):
            expert.linear_fc1.weight.copy_(first)
            expert.linear_fc2.weight.copy_(second)
    x_LBH = drawn(6, 2, HIDDEN, seed=rank + 1).float().requires_grad_()
    y_LBH, _ = layer(x_LBH)
    dy_LBH = drawn(6, 2, HIDDEN, seed=rank + 11).float()
    y_LBH.backward(dy_LBH)

    leaves = [t.float().double().requires_grad_() for t in (router, up, down)]
    total = torch.zeros((), dtype=torch.float64)
    for other in range(ep):
        x = drawn(6, 2, HIDDEN, seed=other + 1).float().double().flatten(0, 1).requires_grad_()
        dy = drawn(6, 2, HIDDEN, seed=other + 11).float().double().flatten(0, 1)
        weights, ids = (x @ leaves[0].T).softmax(1).topk(TOP_K)
        y = moe(x, ids, weights, leaves[1], leaves[2])
        if other == rank:
            router, dx = torch.autograd.grad((y * dy).sum(), [leaves[0], x], retain_graph=True)
            found = {"y": (y_LBH.flatten(0, 1), y), "dx": (x_LBH.grad.flatten(0, 1), dx)}
            found["router"] = layer.router.weight.grad, router
        total = total + (y * dy).sum()
    gradients = torch.autograd.grad(total, leaves[1:])
    for name, grads in zip(("linear_fc1", "linear_fc2"), gradients, strict=True):
        got = torch.stack([expert.get_submodule(name).weight.grad for expert in layer.experts.local_experts])
        found[name] = (got, grads[mine])
    return {name: float((got - true).abs().max() / true.abs().max()) for name, (got, true) in found.items()}


def test_stock_layer_is_right_over_two_ranks() -> None:
    for errors in megatron_ranks(step, 2, "alltoall", 2, ep=2):
        assert max(errors.values()) < 2e-6, errors
