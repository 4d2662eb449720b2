"""trimtab in torchtitan: a token dispatcher that its config takes in place of its own; the rest of a model stays.

    from trimtab.integrations.torchtitan import TokenDispatcher
    config.routed_experts.token_dispatcher = TokenDispatcher.Config(num_experts=64, top_k=8)

or, without touching a model's code, for every MoE layer of it:

    torchtitan ... --override.imports trimtab.integrations.torchtitan.override.token_dispatcher

torchtitan is imported with the first name that is used from here, never before.
"""

from __future__ import annotations

from trimtab.lazy_names import lazy_names

_HOMES = {
    "TokenDispatcher": "trimtab.integrations.torchtitan.dispatcher",
    "TokenExchange": "trimtab.integrations.torchtitan.exchange",
    "Dispatched": "trimtab.integrations.torchtitan.exchange",
    "RoutedExperts": "trimtab.integrations.torchtitan.override",
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
