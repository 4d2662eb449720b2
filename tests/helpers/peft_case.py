"""Tiny models of every family with peft's adapters on their experts, and what a forward and backward leaves there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .families import build_model, experts_modules, sample_batch
from .replayed import run


def targets(model: nn.Module) -> list[str]:
    """`target_parameters` for every weight of every experts module."""
    found = set()
    for name, module in experts_modules(model).items():
        weights = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
        found |= {f"{name.rpartition('.')[2]}.{weight}" for weight in weights}
    return sorted(found)


def lora(model: nn.Module, **options: Any) -> Any:
    from peft import LoraConfig

    given = {"r": 3, "lora_alpha": 6, "target_modules": [], "target_parameters": targets(model)}
    return LoraConfig(**(given | options))


@torch.no_grad()
def fill(model: nn.Module, seed: int = 0) -> None:
    """Noise in every adapter: a new one's B is zero, and so would be half of the gradients."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            noise = 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if isinstance(parameter, DTensor):  # attention's, under tp
                noise = distribute_tensor(noise, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(noise)


def adapt(model: Any, *, autocast_adapter_dtype: bool = False, **options: Any) -> Any:
    """peft's model around this one, whose modules it replaces; the adapters are noise, in the model's dtype."""
    from peft import get_peft_model

    made = get_peft_model(model, lora(model, **options), autocast_adapter_dtype=autocast_adapter_dtype)
    fill(made)
    return made


def adapted(name: str, implementation: str, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> Any:
    """As peft makes it around the family's model, which is its `get_base_model()`."""
    model = build_model(name, seed, dtype)
    model.set_experts_implementation(implementation)
    return adapt(model, autocast_adapter_dtype=True, **options)


def output_and_gradients(model: Any, seed: int = 0) -> dict[str, Tensor]:
    """ "output", "loss", and the gradient of everything trained, by name."""
    base = model.get_base_model()
    return run(base, sample_batch(base, 2, 12, seed))
