"""torchtitan's token dispatcher, where it is installed and has the protocol that we follow."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from trimtab.errors import ConfigError

HOME = "torchtitan.models.common.token_dispatcher"
BASE = "LocalTokenDispatcher"
PROTOCOL = {
    "dispatch": ("x_TD", "topk_scores_TK", "topk_expert_ids_TK", "num_local_tokens_per_expert_E"),
    "combine": ("routed_output_RD", "metadata", "x_TD"),
    "wire_meshes": ("ep_mesh",),
}
"""Arguments by method, self aside: those of torchtitan 0.3.0 and of its sources of August 2026."""
FIELDS = ("num_experts", "top_k")


def torchtitan_base() -> Any:
    """The class that torchtitan's dispatchers come from.

    Raises:
        ConfigError: torchtitan does not import, or its dispatchers have another protocol.
    """
    advice = "trimtab.integrations.torchtitan follows the protocol of torchtitan 0.3.0"
    try:
        base = getattr(import_module(HOME), BASE)
        found = {name: tuple(inspect.signature(getattr(base, name)).parameters)[1:] for name in PROTOCOL}
        fields = base.Config.__dataclass_fields__
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{HOME}.{BASE} cannot be used: {error}. {advice} (pip install torchtitan)") from error
    problems = [f"{name}{found[name]}, expected {PROTOCOL[name]}" for name in PROTOCOL if found[name] != PROTOCOL[name]]
    problems += [f"no field {name!r} in its Config" for name in FIELDS if name not in fields]
    if problems:
        raise ConfigError(f"{HOME}.{BASE} has another protocol: {'; '.join(problems)}. {advice}")
    return base
