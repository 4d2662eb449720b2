"""A run that trains adapters alone: the model with them, what of it a checkpoint holds, and the files that it leaves.

`final/` is a folder of peft's. The weights below are those of the checkpoint that the run began with, and lie there.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trimtab.errors import ConfigError
from trimtab.integrations.transformers.lora.config import lora_config
from trimtab.integrations.transformers.quantized.params import allocate_params
from trimtab.integrations.transformers.quantized.prequantized import prequantized_format
from trimtab.integrations.transformers.quantized.quantizer import experts_in
from trimtab.train.config import Mesh, TrainConfig
from trimtab.train.models import Facts, is_preset

if TYPE_CHECKING:
    from peft import LoraConfig


def configured(model: nn.Module, config: TrainConfig) -> LoraConfig:
    """peft's configuration for a resolved one of ours. Raises ConfigError for a target that the model lacks."""
    targets = [target.strip() for target in (config.lora_targets or "").split(",")]
    try:
        return lora_config(model, rank=config.lora or 0, alpha=config.lora_alpha, targets=targets)
    except ConfigError as error:
        raise ConfigError(f"--lora-targets {error}") from None


def check_adapters(config: TrainConfig, facts: Facts, mesh: Mesh) -> None:
    """Raise ConfigError for targets that the model lacks, and for what peft or the checkpoint cannot do."""
    for name, size in (("--tp", mesh.tp), ("--replicate", mesh.replicate)):
        if size > 1 and config.lora_targets != "experts":
            raise ConfigError(
                f"--lora with {name} {size}: peft sizes adapters of linear layers by one rank's shard then; use "
                f"--lora-targets experts, or {name} 1"
            )
    if config.quantize and mesh.ep == 1 and mesh.tp > 1:
        raise ConfigError(f"--quantize with --tp {mesh.tp} and --ep 1: codes are sharded by expert alone; give --ep 2")
    try:
        _held_as_codes(facts.skeleton, config)
    except ConfigError as error:
        raise ConfigError(f"--quantize {config.quantize}: {error}") from None
    configured(facts.skeleton, config)


def adapted(model: Any, config: TrainConfig) -> Any:
    """The model with new adapters around it, the same on every rank, and everything else frozen."""
    from peft import get_peft_model

    torch.manual_seed(config.seed)
    meta = next(model.parameters()).is_meta
    return get_peft_model(model, configured(model, config), low_cpu_mem_usage=meta)


def adapted_skeleton(facts: Facts, config: TrainConfig) -> Any:
    """What `adapted` will make, on the meta device, over codes where the run has them."""
    return adapted(_held_as_codes(facts.skeleton, config), config)


def _held_as_codes(skeleton: nn.Module, config: TrainConfig) -> nn.Module:
    """A copy of the model whose experts are what the run will hold. Raises ConfigError where they cannot be that."""
    from transformers import AutoConfig

    model, name = deepcopy(skeleton), config.quantize
    if name == "keep":
        kept = None if is_preset(config.model) else prequantized_format(AutoConfig.from_pretrained(config.model))
        if kept is None:
            raise ConfigError(f"the experts of {config.model} are no codes that can be kept; use nf4 or int8")
        name = kept
    for module in experts_in(model) if name else ():
        allocate_params(module, name or "")
    return model


def trained_part(model: nn.Module) -> nn.Module:
    """The trained parameters of a model alone, the very same, in modules of the same names."""
    whole = nn.Module()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            *path, own = name.split(".")
            module = whole
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(own, parameter)
    return whole


def write_adapter(model: Any, folder: Path, *, base: str, dtype: str | None) -> None:
    """Write peft's folder of the model's adapters, which every rank has whole; one rank calls.

    base: where the model below lies, as the folder says. dtype: of the adapters; what they are trained in if not given.
    """
    (made,) = model.peft_config.values()
    made.base_model_name_or_path = base
    wanted = None if dtype is None else getattr(torch, dtype)
    state = {name: p.detach().to(dtype=wanted) for name, p in model.named_parameters() if p.requires_grad}
    model.save_pretrained(folder, state_dict=state, save_embedding_layers=False)
