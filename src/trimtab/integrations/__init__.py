"""Where trimtab plugs into other frameworks. Each folder imports its framework, and nothing else does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.lazy_names import lazy_names

if TYPE_CHECKING:
    from trimtab.integrations import megatron as megatron
    from trimtab.integrations import torchtitan as torchtitan
    from trimtab.integrations import transformer_engine as transformer_engine
    from trimtab.integrations import transformers as transformers

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
