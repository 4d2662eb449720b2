"""Experts layers as contestants: trimtab's and transformers' own, behind transformers' registries or alone.

    trimtab                         trimtab as transformers' experts and, with ranks, as its exchange
    grouped_mm, eager, batched_mm   transformers' experts implementations, on one rank
    all_to_all                      transformers' expert parallelism, its experts "grouped_mm"
    ExpertMLP                       trimtab's own module on one backend

Legend: T tokens, K experts per token, D model dim, F expert hidden dim, E experts, e experts of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.layer_case import LayerCase, expert_weights
from benchmarks.layer_step import Layer, layer_subject
from benchmarks.subject import Subject, Where

ONE_RANK = ("grouped_mm", "eager", "batched_mm")
MANY_RANKS = ("all_to_all",)


def registered(transport: str = "alltoall") -> str:
    """The name under which transformers finds trimtab with this transport. Of a checkout of version 0.1 as well."""
    try:
        from trimtab.integrations.transformers import register
    except ImportError:
        from trimtab.hf import register
    name = f"trimtab_{transport}"
    register(name, transport=transport)
    return name


def qwen_block(dim: int, hidden: int, experts: int, top_k: int, implementation: str) -> Any:
    """transformers' Qwen3-MoE block, router and experts."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=dim,
        moe_intermediate_size=hidden,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
    )
    config._experts_implementation = implementation
    return Qwen3MoeSparseMoeBlock(config)


def build(args: dict[str, Any], where: Where) -> Subject:
    """args: the case, `implementation`, and `transport` for trimtab over ranks."""
    case, name = LayerCase.of(args), args["implementation"]
    if name == "trimtab":
        name = registered(args.get("transport") or "alltoall")
    layer, weights = qwen_layer(case, name, where)
    return layer_subject(layer, case, where.rank, weights)


def qwen_layer(case: LayerCase, name: str, where: Where) -> tuple[Layer, list[torch.Tensor]]:
    """Qwen3-MoE's experts with the case's weights, under an implementation of transformers' by its name; and the
    weights. Collective with ranks."""
    experts, weights = qwen_experts(
        case, "grouped_mm" if name == "all_to_all" else name, expert_weights(case, where.rank)
    )
    layer: Layer = spread(experts, name, where) if where.ranks > 1 else experts
    return layer, weights


def qwen_experts(
    case: LayerCase, implementation: str, weights: tuple[torch.Tensor, torch.Tensor]
) -> tuple[Any, list[torch.Tensor]]:
    """Qwen3-MoE's experts on these very weights, see `expert_weights`; and their parameters."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    gate_up, down = weights
    config = Qwen3MoeConfig(hidden_size=case.dim, moe_intermediate_size=case.hidden, num_experts=gate_up.shape[0])
    config._experts_implementation = implementation
    with torch.device("meta"):
        experts: Any = Qwen3MoeExperts(config)
    experts.gate_up_proj, experts.down_proj = torch.nn.Parameter(gate_up), torch.nn.Parameter(down)
    return experts, [experts.gate_up_proj, experts.down_proj]


def spread(experts: Any, name: str, where: Where) -> Layer:
    """The experts of all ranks behind the exchange that transformers has under this name. Every rank must call."""
    from transformers.distributed.expert_parallel import EPImplementationInterface

    experts._is_expert_parallel = True
    meshes = init_device_mesh("cpu", (where.ranks, 1), mesh_dim_names=("ep", "tp"))
    made: Layer = EPImplementationInterface()[name](experts, meshes["ep"], meshes["tp"])
    return made


def alone(
    case: LayerCase, backend: Any, weights: tuple[torch.Tensor, torch.Tensor]
) -> tuple[Layer, list[torch.Tensor]]:
    """`ExpertMLP` on one backend and on these very weights; and its parameters. trimtab without transformers."""
    from trimtab.experts.module import ExpertMLP

    experts = ExpertMLP(
        case.num_experts, case.dim, case.hidden, dtype=case.torch_dtype, device="meta", kernels=backend
    )  # fmt: skip
    experts.gate_up = torch.nn.Parameter(weights[0].unflatten(1, (2, case.hidden)))
    experts.down = torch.nn.Parameter(weights[1])
    return experts, [experts.gate_up, experts.down]
