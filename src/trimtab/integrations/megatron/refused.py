"""What a Megatron configuration may not ask of an MoE layer of ours, said by name when the layer is built."""

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
"""Options that must not be set, and what they ask for."""


def refuse(config: Any) -> None:
    """Raises:
    ConfigError: what is asked for cannot be done behind our dispatch.
    """
    asked = [name for name in REFUSED if getattr(config, name, None)]
    problems = [f"{name}={getattr(config, name)!r} asks for {REFUSED[name]}" for name in asked]
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
