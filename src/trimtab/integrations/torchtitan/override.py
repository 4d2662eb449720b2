"""An override of torchtitan's config: `--override.imports trimtab.integrations.torchtitan.override.token_dispatcher`.

torchtitan imports this file when a user names it, and keeps its own list of overrides.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from trimtab.integrations.torchtitan.dispatcher import TokenDispatcher
from trimtab.integrations.torchtitan.exchange import HOME

_config: Any = import_module("torchtitan.config.override")


@_config.override(  # type: ignore[untyped-decorator]
    target=import_module(HOME).AllToAllTokenDispatcher.Config, description="Token dispatch over trimtab's exchange."
)
def token_dispatcher(cfg: Any, *, combine: str = "sum") -> Any:
    """Every all-to-all dispatcher of the config becomes ours, with its sizes and its padding."""
    return _config.derive(cfg, TokenDispatcher.Config, combine=combine)
