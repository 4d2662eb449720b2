"""Others' experts layers as contestants. A peer is imported when it is raced, and only then.

    grouped_mm, eager, batched_mm   transformers' experts implementations, on one rank
    trimtab-hf                      trimtab as transformers' experts implementation, on one rank
    all_to_all                      transformers' expert parallelism, its experts "grouped_mm"
    torchtitan                      its routed experts, with its all-to-all token dispatcher where there are ranks

Legend: T tokens, K experts per token, D model dim, F expert hidden dim, E experts, e experts of this rank.
"""
# torchtitan is seldom at hand where types are checked.
# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.layer_case import LayerCase, LayerData, expert_biases, expert_weights
from benchmarks.layer_step import Layer, layer_subject
from benchmarks.subject import Subject, Where

ONE_RANK = ("grouped_mm", "eager", "batched_mm", "trimtab-hf", "torchtitan")
MANY_RANKS = ("all_to_all", "torchtitan")


def build_transformers(args: dict[str, Any], where: Where) -> Subject:
    """args: the case and `peer`. The experts of the case's family."""
    case, peer = LayerCase.of(args), args["peer"]
    if peer == "trimtab-hf":
        import trimtab.integrations.transformers

        trimtab.integrations.transformers.register()
    implementation = {"all_to_all": "grouped_mm", "trimtab-hf": "trimtab"}.get(peer, peer)
    experts = (_gpt_oss if case.family == "gpt_oss" else _qwen3_moe)(case, where, implementation)
    layer: Layer = experts
    if where.ranks > 1:
        from transformers.distributed.expert_parallel import AllToAllEP

        meshes = init_device_mesh("cpu", (where.ranks, 1), mesh_dim_names=("ep", "tp"))
        experts._is_expert_parallel = True
        layer = AllToAllEP(experts, meshes["ep"], meshes["tp"])

    def gradients() -> list[Tensor]:
        weights = [experts.gate_up_proj.grad, experts.down_proj.grad]
        biases = [experts.gate_up_proj_bias.grad, experts.down_proj_bias.grad] if experts.has_bias else []
        return [weight.mT if experts.is_transposed else weight for weight in weights] + biases

    data, params = LayerData.of(case, where.rank), list(experts.parameters())
    return layer_subject(layer, data, params, gradients, autocast=case.autocast, accumulate=case.in_place)


def _qwen3_moe(case: LayerCase, where: Where, implementation: str) -> Any:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    up, down = expert_weights(case, where.rank)
    config = Qwen3MoeConfig(hidden_size=case.dim, moe_intermediate_size=case.hidden, num_experts=up.shape[0])
    config._experts_implementation = implementation
    experts: Any = Qwen3MoeExperts(config).to(case.torch_dtype)
    with torch.no_grad():
        experts.gate_up_proj.copy_(up)
        experts.down_proj.copy_(down)
    return experts


def _gpt_oss(case: LayerCase, where: Where, implementation: str) -> Any:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    (up, down), biases = expert_weights(case, where.rank), expert_biases(case)
    assert biases is not None
    config = GptOssConfig(hidden_size=case.dim, intermediate_size=case.hidden, num_local_experts=up.shape[0])
    config._experts_implementation = implementation
    experts: Any = GptOssExperts(config).to(case.torch_dtype)
    with torch.no_grad():
        experts.gate_up_proj.copy_(up.mT)
        experts.down_proj.copy_(down.mT)
        experts.gate_up_proj_bias.copy_(biases[0])
        experts.down_proj_bias.copy_(biases[1])
    return experts


def build_torchtitan(args: dict[str, Any], where: Where) -> Subject:
    """args: the case. Without its router: ids and weights are given, and tokens per expert are counted here."""
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

    case = LayerCase.of(args)
    # Gloo refuses the all-to-all of its other backend wherever splits differ.
    set_spmd_backend("partial_dtensor")
    kind = AllToAllTokenDispatcher if where.ranks > 1 else LocalTokenDispatcher
    up, down = expert_weights(case, where.rank)
    config = RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(dim=case.dim, hidden_dim=case.hidden, num_experts=up.shape[0]),
        token_dispatcher=kind.Config(num_experts=case.num_experts, top_k=case.top_k),
    )
    routed: Any = config.build()
    gate, value = up.chunk(2, 1)
    named = {"w1_EFD": gate, "w3_EFD": value, "w2_EDF": down}
    for name, weight in named.items():
        setattr(routed.inner_experts, name, torch.nn.Parameter(weight.contiguous()))
    params = [routed.inner_experts.get_parameter(name) for name in named]
    if where.ranks > 1:
        routed.token_dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (where.ranks,), mesh_dim_names=("ep",)))

    def layer(x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> Tensor:
        counts_E = torch.bincount(ids_TK.reshape(-1), minlength=case.num_experts)
        y: Tensor = routed(x_TD, w_TK, ids_TK, counts_E)
        return y

    def gradients() -> tuple[Tensor, Tensor]:
        first, third, second = (param.grad for param in params)
        assert first is not None
        assert second is not None
        assert third is not None
        return torch.cat((first, third), 1), second

    data = LayerData.of(case, where.rank)
    return layer_subject(layer, data, params, gradients, autocast=case.autocast, accumulate=case.in_place)
