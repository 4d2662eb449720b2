"""`--spec trimtab.integrations.megatron.hybrid stack`: Megatron's hybrid stack with our MoE layers, by name.

In a file of its own, for it imports Megatron's Mamba layers.
"""

from __future__ import annotations

from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec

from trimtab.integrations.megatron.specs import use

stack = use(mamba_stack_spec)
