"""What a Megatron configuration may not ask of our MoE layer, experts and linears, said by name when they are built."""

from __future__ import annotations

from typing import Any

from trimtab.errors import ConfigError

PAD = "every expert padded to its capacity: tokens go where they are routed, however many"
REFUSED = {
    "moe_pad_expert_input_to_capacity": PAD,
    "moe_expert_rank_capacity_factor": "tokens dropped beyond what a rank may receive",
    "moe_shared_expert_overlap": "shared experts inside of Megatron's own dispatchers",
    "overlap_moe_expert_parallel_comm": "two micro-batches interleaved, each layer cut between dispatch and combine",
    "overlap_dispatch_backward_with_experts_wgrad": "weight gradients on a CUDA stream beside dispatch's backward",
    "moe_router_padding_for_quantization": "routes added so that low precision finds aligned rows",
    "moe_router_padding_for_fp8": "routes added so that low precision finds aligned rows",
}
"""Options of a layer that must not be set, and what they ask for."""
LOW = {
    "fp8": "products in 8 bits",
    "fp4": "products in 4 bits",
    "use_transformer_engine_op_fuser": "TransformerEngine's fused operators",
}
EXPERTS = LOW | {
    "use_te_activation_func": "activations of TransformerEngine",
    "moe_mlp_glu_interleave_size": "gates and ups that alternate",
    "moe_paged_stash": "paged stashing",
    "use_kitchen": "Kitchen's linears",
}
LINEARS = LOW | {
    "moe_single_grouped_weight": "one weight of all experts",
    "moe_single_grouped_bias": "one bias of all experts",
}


def _asked(config: Any, options: dict[str, str], groups: Any = None) -> list[str]:
    found = [f"{name}={getattr(config, name)!r} asks for {says}" for name, says in options.items()
             if getattr(config, name, None)]  # fmt: skip
    remat = getattr(groups, "expt_gtp_remat", None)
    if remat is not None and remat.size() > 1:
        found.append("expt_gtp_remat asks for weights cut over a group of generalized tensor parallelism")
    return found


def refuse_in_experts(config: Any, groups: Any) -> None:
    """Raises:
    ConfigError: `Experts` cannot be what the configuration says.
    """
    why = _asked(config, EXPERTS, groups)
    offloaded = set(getattr(config, "offload_modules", None) or ()) & {"expert_fc1", "moe_act", "fused_group_mlp"}
    if getattr(config, "fine_grained_activation_offloading", False) and offloaded:
        why.append(f"offload_modules {sorted(offloaded)} are inside of these experts, which keep their rows alone")
    if config.add_bias_linear and groups.expt_tp.size() > 1:
        why.append("add_bias_linear=True with expert tensor parallelism: Megatron's experts have no biases then")
    if config.moe_apply_probs_on_input and config.moe_router_topk != 1:
        why.append("moe_apply_probs_on_input=True needs moe_router_topk=1")
    if why:
        raise ConfigError(f"trimtab's experts do not have: {'; '.join(why)}. use(spec, experts=False) keeps Megatron's")


def refuse_in_linears(config: Any, groups: Any, is_expert: bool) -> None:
    """Raises:
    ConfigError: `linears.GroupedLinear` cannot be what the configuration says.
    """
    why = _asked(config, LINEARS, groups) + ([] if is_expert else ["is_expert=False"])
    if why:
        raise ConfigError(f"trimtab's grouped linears do not have: {'; '.join(why)}")


def refuse(config: Any) -> None:
    """Raises:
    ConfigError: what is asked for cannot be done behind our dispatch.
    """
    problems = _asked(config, REFUSED)
    if config.moe_token_dispatcher_type == "flex":
        problems.append(
            "moe_token_dispatcher_type='flex' is for its own backends: leave 'alltoall', ours takes its place"
        )
    if getattr(config, "transformer_impl", "") == "inference_optimized":
        problems.append("transformer_impl='inference_optimized' puts dispatchers for inference into the layer")
    if (graphs := _graphs(config)) is not None:
        problems.append(f"CUDA graphs of {graphs}, which hold MoE layers: counts are read on the host in between")
    if problems:
        raise ConfigError(f"Megatron's MoE layers with trimtab's dispatch do not have: {'; '.join(problems)}")


def _graphs(config: Any) -> str | None:
    """What CUDA graphs are made of, where MoE layers are inside."""
    if getattr(config, "cuda_graph_impl", "none") in ("none", None):
        return None
    given = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", None) or ["full"]
    scopes = [str(getattr(scope, "name", scope)) for scope in ([given] if isinstance(given, str) else given)]
    inside = [scope for scope in scopes if scope.startswith(("moe", "full"))]
    return ", ".join(inside) if inside else None
