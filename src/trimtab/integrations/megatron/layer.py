"""Megatron's MoE layer with our dispatch between its router and its experts, or ours.

Legend: T local tokens, K experts per token, E experts, M rows of this rank, H hidden size, S positions, B sequences.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor

from trimtab.dispatch.options import ExchangeOptions
from trimtab.dispatch.route import ZeroGradients
from trimtab.errors import ConfigError
from trimtab.integrations.megatron.dispatcher import PAD, TokenDispatcher
from trimtab.integrations.megatron.protocol import MegatronMoELayer, asked, get_default_pg_collection
from trimtab.integrations.megatron.router import Router

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


class MoELayer(MegatronMoELayer):  # type: ignore[misc]
    """In the place of Megatron's MoELayer, with its arguments, parameters and state dict: `use` puts it into a spec.

    Everything but the exchange is Megatron's: latent projections, shared experts, recompute, the router unless
    `use(spec, router="trimtab")`. Ranks may have any number of tokens. Padding does not travel, and gets 0.

    Args:
        config, submodules, layer_number, pg_collection, args, kwargs: as Megatron's MoELayer takes it.
        options: as in `TokenDispatcher`.

    Raises:
        ConfigError: the configuration asks for what cannot be done here; see `REFUSED`.
    """

    def __init__(
        self, config: Any, submodules: Any = None, layer_number: int | None = None, pg_collection: Any = None,
        *args: Any, options: ExchangeOptions | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        refuse(config)
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        # Megatron makes a dispatcher of its own first: the one that takes nothing. Others read the option later.
        asked, config.moe_token_dispatcher_type = config.moe_token_dispatcher_type, "allgather"
        try:
            super().__init__(config, submodules, layer_number, groups, *args, **kwargs)
        finally:
            config.moe_token_dispatcher_type = asked
        self.token_dispatcher = TokenDispatcher(
            config, groups, takes_rows=getattr(self.experts, "takes_rows", False),
            options=options or ExchangeOptions(), layer=kwargs.get("name") or "",
        )  # fmt: skip

    packs: Any = None
    """The `packed_seq_params` of the forward that is under way, see `packs.TellsPacks`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's. What it runs again in the backward holds the packs of its own forward."""
        return MegatronMoELayer.forward(self if self.packs is None else copy(self), *args, **kwargs)

    def route(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Tokens [S, B, H], S * B >= 0, and where they are padding, bool [S, B] -> what `dispatch_preprocess` takes."""
        self.token_dispatcher.exchange.begin()
        if isinstance(self.router, Router):
            weights_TK, ids_TK = self.router(hidden_states, padding_mask, packs=self.packs)
            return weights_TK, ids_TK
        if hidden_states.numel() == 0:
            return self._route_nothing(hidden_states)
        probs_TE, map_TE = super().route(hidden_states, padding_mask)
        return probs_TE, map_TE if padding_mask is None else map_TE & ~padding_mask.reshape(-1, 1)

    def _route_nothing(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Megatron's router cannot reshape the logits of no tokens, but its losses are collective: it sees one token of
        padding. Nothing comes of it, and its parameters get gradients of zero."""
        padding = torch.ones(1, 1, dtype=torch.bool, device=hidden_states.device)
        probs, routing_map = super().route(hidden_states.new_zeros(1, 1, hidden_states.shape[-1]), padding)
        none = probs.detach()[:0]
        return ZeroGradients.apply(none, *self.router.parameters()), routing_map[:0]  # type: ignore[no-untyped-call]

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """As Megatron's; experts that take rows are told how many slots there are, where the host knows."""
        dispatcher = self.token_dispatcher
        if not dispatcher.takes_rows:
            y, _ = super().routed_experts_compute(hidden_states, probs)
            return y, None
        rows = dispatcher.dispatch_postprocess(hidden_states, probs)
        y, _ = self.experts(*rows, num_slots=dispatcher.rows.num_slots)
        return dispatcher.combine_preprocess(y), None


def refuse(config: Any) -> None:
    """Raise ConfigError if what is asked for cannot be done behind our dispatch."""
    problems = asked(config, REFUSED)
    if config.moe_token_dispatcher_type == "flex":
        problems.append("moe_token_dispatcher_type='flex' is for its own backends: leave 'alltoall', ours replaces it")
    if getattr(config, "transformer_impl", "") == "inference_optimized":
        problems.append("transformer_impl='inference_optimized' puts dispatchers for inference into the layer")
    if graphs := _graphs(config):
        problems.append(f"CUDA graphs of {graphs}, which hold MoE layers: counts are read on the host in between")
    if problems:
        raise ConfigError(f"Megatron's MoE layers with trimtab's dispatch do not have: {'; '.join(problems)}")


def _graphs(config: Any) -> str:
    """What CUDA graphs are made of, where MoE layers are inside."""
    if getattr(config, "cuda_graph_impl", "none") in ("none", None):
        return ""
    given = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", None) or ["full"]
    scopes = [str(getattr(scope, "name", scope)) for scope in ([given] if isinstance(given, str) else given)]
    return ", ".join(scope for scope in scopes if scope.startswith(("moe", "full")))
