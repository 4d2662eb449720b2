"""What else Megatron's configuration says of an MoE layer holds with our exchange in it: where tokens are even, and its
own dispatcher is right, the results are its own.

Legend: E experts, S positions, B sequences, H hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.megatron_case import EXPERTS, Case, check, drawn, input_of, layer_of, of_kind, parameters_of
from helpers.megatron_cpu import megatron, megatron_ranks, moe_utils

OPTIONS: dict[str, dict[str, Any]] = {
    "shared experts": {"moe_shared_expert_intermediate_size": 12},
    "shared experts recomputed": {
        "moe_shared_expert_intermediate_size": 12, "recompute_granularity": "selective",
        "recompute_modules": ["shared_experts"],
    },
    "shared experts with a gate": {"moe_shared_expert_intermediate_size": 12, "moe_shared_expert_gate": True},
    "latent projections": {"moe_latent_size": 8},
    "jitter": {"moe_input_jitter_eps": 0.1},
    "softmax before": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "groups": {"moe_router_pre_softmax": True, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
    "expert bias": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    "losses": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.1, 0.2, 0.3], "moe_z_loss_coeff": 0.1,
    },
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "probabilities on the input": {
        "moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True,
    },
    "biases": {"add_bias_linear": True},
    "recomputed": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}  # fmt: skip


class Projection(nn.Linear):
    """In the place of TransformerEngine's linear, which latent projections ask for."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, **options: Any) -> None:
        super().__init__(in_features, out_features, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


@contextlib.contextmanager
def projections() -> Iterator[None]:
    home = megatron.core.transformer.moe.moe_layer
    with patch.object(home, "HAVE_TE", True), patch.object(home, "TELinear", Projection, create=True):
        yield


def results(case: Case, state: dict[str, Tensor]) -> list[Tensor]:
    """Output and gradients of this rank's layer; what is not of the experts comes from `state`, or goes there."""
    with projections():
        layer = layer_of(case)
    own = {name: t for name, t in layer.state_dict().items() if isinstance(t, Tensor)}
    own = {name: t for name, t in own.items() if not name.startswith("experts.")}
    for i, (name, value) in enumerate(sorted(own.items())):
        value.copy_(state.setdefault(name, drawn(*value.shape, seed=50 + i) / 3))
    for name in ("linear_fc1", "linear_fc2"):
        for i, bias in enumerate(biases_of(layer, name)):
            with torch.no_grad():
                bias.copy_(drawn(*bias.shape, seed=70 + layer.local_expert_indices[i]))
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor([0.5])
    given = input_of(case, dist.get_rank(), 0)
    torch.manual_seed(3)
    x = given.x_SBH.requires_grad_()
    y, _ = layer(x)
    y.backward(given.dy_SBH)
    others = [p.grad for name, p in layer.named_parameters() if not name.startswith("experts.")]
    experts = [g for name in ("linear_fc1", "linear_fc2") for g in parameters_of(layer, name, "grad")]
    return [y.detach(), x.grad, *others, *experts]


def biases_of(layer: Any, name: str) -> list[Tensor]:
    if hasattr(layer.experts, "local_experts"):
        found = [expert.get_submodule(name).bias for expert in layer.experts.local_experts]
        return [] if found[0] is None else found
    named = dict(layer.experts.get_submodule(name).named_parameters())
    return [p for key, bias in named.items() if "bias" in key for p in (bias if bias.dim() == 2 else [bias])]


def differences() -> dict[str, float]:
    found = {}
    for name, options in OPTIONS.items():
        state: dict[str, Tensor] = {}
        case = Case(tokens=[(6, 2)], options=options, sizes={"ep": dist.get_world_size()})
        wanted = results(replace(case, use=None), state)
        for kind in ("dispatcher", "pair"):
            got = results(of_kind(case, kind), state)
            for a, b in zip(got, wanted, strict=True):
                off = float((a - b).abs().max()) / max(1.0, float(b.abs().max()))
                found[f"{name}, {kind}"] = max(off, found.get(f"{name}, {kind}", 0.0))
    return found


def test_options_hold() -> None:
    for found in megatron_ranks(differences, 2, ep=2):
        assert not {name: off for name, off in found.items() if not off < 1e-5}


def test_weight_gradients_may_come_later() -> None:
    case = Case(tokens=[(6, 2), (0, 1)], options={"delay_wgrad_compute": True}, sizes={"ep": 2})
    check({kind: of_kind(case, kind) for kind in ("pair", "linears")}, 2)


def masked_bias() -> tuple[Tensor, Tensor]:
    """What our router counts for the expert bias, with as many tokens as experts, half of them padding."""
    options = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    case = Case(tokens=[(EXPERTS, 1)], padding=[0.5], options=options, use={"router": "trimtab"})
    layer, given = layer_of(case), input_of(case, 0, 0)
    layer(given.x_SBH, padding_mask=given.padding_BS)
    ids = (given.x_SBH[: EXPERTS // 2, 0] @ layer.router.weight.T).topk(2).indices
    return layer.router.local_tokens_per_expert, torch.nn.functional.one_hot(ids, EXPERTS).sum((0, 1)).float()


def test_expert_bias_counts_real_tokens_alone() -> None:
    """Megatron's own router raises on a padding mask here, or counts wrongly where T == E."""
    ((counted, wanted),) = megatron_ranks(masked_bias, 1)
    assert torch.equal(counted, wanted)
