"""Overrides of torchtitan's config: `--override.imports trimtab.integrations.torchtitan.override.token_dispatcher`, or
`….replicated_experts`, which is that and replicas of hot experts.

torchtitan imports this file when a user names it, and keeps its own list of overrides.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from trimtab.dispatch.options import COPY_COST, Replication
from trimtab.integrations.torchtitan.dispatcher import TokenDispatcher
from trimtab.integrations.torchtitan.exchange import HOME
from trimtab.integrations.torchtitan.replicated import RoutedExperts

_config: Any = import_module("torchtitan.config.override")


@_config.override(  # type: ignore[untyped-decorator]
    target=import_module(HOME).AllToAllTokenDispatcher.Config, description="Token dispatch over trimtab's exchange."
)
def token_dispatcher(cfg: Any, *, combine: str = "sum") -> Any:
    """Every all-to-all dispatcher of the config becomes ours, with its sizes and its padding."""
    return _config.derive(cfg, TokenDispatcher.Config, combine=combine)


@_config.override(  # type: ignore[untyped-decorator]
    target=import_module("torchtitan.models.common.moe").RoutedExperts.Config,
    description="Token dispatch over trimtab's exchange, with hot experts copied to ranks that have room.",
)
def replicated_experts(
    cfg: Any, *, combine: str = "sum", replicate_experts: Replication = "auto", copy_cost: int = COPY_COST
) -> Any:
    """Every layer's routed experts. Not beside `token_dispatcher`, which this one comes with."""
    sent = token_dispatcher(cfg.token_dispatcher, combine=combine)
    return _config.derive(
        cfg, RoutedExperts.Config, token_dispatcher=sent, replicate_experts=replicate_experts, copy_cost=copy_cost
    )
