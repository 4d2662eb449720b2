"""trimtab in torchtitan: a token dispatcher that its config takes in place of its own; the rest of a model stays.

    from trimtab.integrations.torchtitan import TokenDispatcher
    config.routed_experts.token_dispatcher = TokenDispatcher.Config(num_experts=64, top_k=8)

or, without touching a model's code, for every MoE layer of it:

    torchtitan ... --override.imports trimtab.integrations.torchtitan.override.token_dispatcher

torchtitan is imported with the first name that is used from here, never before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.lazy_names import lazy_names

if TYPE_CHECKING:
    from trimtab.integrations.torchtitan.dispatcher import TokenDispatcher as TokenDispatcher
    from trimtab.integrations.torchtitan.exchange import Dispatched as Dispatched
    from trimtab.integrations.torchtitan.exchange import TokenExchange as TokenExchange
    from trimtab.integrations.torchtitan.override import RoutedExperts as RoutedExperts


if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
