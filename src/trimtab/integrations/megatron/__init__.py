"""trimtab in Megatron-Core: its MoE layers with trimtab's dispatch, experts and combine; the rest of a model stays.

    spec = trimtab.megatron.use(spec)           any layer, block or hybrid spec that Megatron builds a model from

or, without touching a model's code, `--spec trimtab.integrations.megatron.specs gpt`.

megatron.core is imported with the first name that is used from here, never before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.lazy_names import lazy_names

if TYPE_CHECKING:
    from trimtab.integrations.megatron.dispatcher import TokenDispatcher as TokenDispatcher
    from trimtab.integrations.megatron.experts import Experts as Experts
    from trimtab.integrations.megatron.layer import MoELayer as MoELayer
    from trimtab.integrations.megatron.router import Router as Router
    from trimtab.integrations.megatron.specs import use as use


if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
