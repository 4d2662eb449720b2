"""What of Megatron-Core this plugs into, checked when it is imported: megatron-core 0.16 to 0.19 have it alike.

What differs between them:

    0.16, 0.17      an MoE layer is ModuleSpec(MoELayer, submodules=...), and built with the global process groups
    from 0.17       MoELayer and the router are told `is_mtp_layer`
    from 0.18       an MoE layer is functools.partial(MoELayer, submodules=...); it is told its `name` and its groups
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from importlib import import_module
from typing import Any

from trimtab.errors import ConfigError
from trimtab.extras import install

MOE = "megatron.core.transformer.moe"
METHODS: dict[str, dict[str, tuple[str, ...]]] = {
    f"{MOE}.moe_layer.MoELayer": {
        "__init__": ("config", "submodules", "layer_number", "pg_collection"),
        "route": ("hidden_states", "padding_mask"), "preprocess": ("hidden_states", "probs", "routing_map"),
        "dispatch": ("hidden_states", "probs"), "routed_experts_compute": ("hidden_states", "probs"),
        "combine": ("output",), "postprocess": ("output", "shared_expert_output"),
    },
    f"{MOE}.token_dispatcher.MoETokenDispatcher": {
        "__init__": ("config", "pg_collection"), "dispatch_preprocess": ("tokens", "routing_map", "probs"),
        "token_dispatch": ("hidden_states", "probs"), "dispatch_postprocess": ("hidden_states", "probs"),
        "combine_preprocess": ("hidden_states",), "token_combine": ("hidden_states",),
        "combine_postprocess": ("hidden_states",),
    },
    f"{MOE}.router.TopKRouter": {
        "__init__": ("config", "pg_collection"),
        "forward": ("input", "padding_mask"),
        "get_aux_loss_coeff": ("aux_loss_type",),
        "attach_and_log_load_balancing_loss": (
            "activation", "aux_loss_coeff", "aux_loss", "aux_loss_name", "reduce_group",
        ),
    },
}  # fmt: skip
"""The first arguments by method, self aside; more may follow."""
FUNCTIONS = {f"{MOE}.moe_utils.get_default_pg_collection"}
FIELDS: dict[str, tuple[str, ...]] = {
    f"{MOE}.moe_layer.MoESubmodules": ("experts", "shared_experts", "router"),
    "megatron.core.transformer.spec_utils.ModuleSpec": ("module", "params", "submodules"),
}


def checked(methods: dict[str, dict[str, tuple[str, ...]]], names: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """The classes that these describe, by name.

    Raises:
        ConfigError: megatron.core does not import, or has others than these.
    """
    classes: dict[str, Any] = {}
    problems = []
    try:
        version = import_module("megatron.core").__version__
        for path in (*methods, *names, *FUNCTIONS):
            home, _, name = path.rpartition(".")
            classes[name] = getattr(import_module(home), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"megatron.core cannot be used: {error}. {_ADVICE}") from error
    for path, expected_of in methods.items():
        name = path.rpartition(".")[2]
        for method, expected in expected_of.items():
            found = tuple(inspect.signature(getattr(classes[name], method, lambda: None)).parameters)[1:]
            if found[: len(expected)] != expected or not hasattr(classes[name], method):
                problems.append(f"{name}.{method}{found}, expected {expected}")
    for path, expected in names.items():
        name = path.rpartition(".")[2]
        found = tuple(field.name for field in fields(classes[name]))
        if not set(expected) <= set(found):
            problems.append(f"{name} has fields {found}, expected {expected} among them")
    if problems:
        raise ConfigError(f"megatron-core {version} has another protocol: {'; '.join(problems)}. {_ADVICE}")
    return classes


def asked(config: Any, options: dict[str, str]) -> list[str]:
    """Those of the options that a configuration sets, each with what it asks for."""
    named = [(name, getattr(config, name, None), says) for name, says in options.items()]
    return [f"{name}={value!r} asks for {says}" for name, value, says in named if value]


_ADVICE = f"trimtab.integrations.megatron follows megatron-core 0.16 to 0.19 ({install('megatron')})"
_FOUND = checked(METHODS, FIELDS)
MegatronMoELayer: Any = _FOUND["MoELayer"]
MegatronTokenDispatcher: Any = _FOUND["MoETokenDispatcher"]
TopKRouter: Any = _FOUND["TopKRouter"]
MoESubmodules: Any = _FOUND["MoESubmodules"]
ModuleSpec: Any = _FOUND["ModuleSpec"]
get_default_pg_collection: Any = _FOUND["get_default_pg_collection"]
