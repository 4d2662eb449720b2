"""trimtab in Megatron-Core: its MoE layers with trimtab's dispatch, experts and combine; the rest of a model stays.

    spec = trimtab.megatron.use(spec)           any layer, block or hybrid spec that Megatron builds a model from

or, without touching a model's code, `--spec trimtab.integrations.megatron.specs gpt`.

megatron.core is imported with the first name that is used from here, never before.
"""

from __future__ import annotations

from trimtab.lazy_names import lazy_names

_HOMES = {
    "MoELayer": "trimtab.integrations.megatron.layer",
    "TokenDispatcher": "trimtab.integrations.megatron.dispatcher",
    "Experts": "trimtab.integrations.megatron.experts",
    "Router": "trimtab.integrations.megatron.router",
    "use": "trimtab.integrations.megatron.specs",
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
