"""trimtab in torchtitan: a token dispatcher that its config takes in place of its own; the rest of a model stays.

    from trimtab.titan import TokenDispatcher
    config.routed_experts.token_dispatcher = TokenDispatcher.Config(num_experts=64, top_k=8)

or, without touching a model's code, for every MoE layer of it:

    torchtitan ... --override.imports trimtab.titan.override.token_dispatcher

torchtitan is imported with the first name that is used from here, never before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.titan.dispatcher import TokenDispatcher as TokenDispatcher
    from trimtab.titan.exchange import Dispatched as Dispatched
    from trimtab.titan.exchange import TokenExchange as TokenExchange

_HOMES = {"TokenDispatcher": "dispatcher", "TokenExchange": "exchange", "Dispatched": "exchange"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trimtab.titan' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"trimtab.titan.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
