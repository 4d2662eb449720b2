"""A model by name or path: what it is made of, which options it allows, and adapters on it."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trimtab.convert.layouts import experts_modules
from trimtab.convert.steps import moved_rows
from trimtab.errors import ConfigError, first_line
from trimtab.integrations.transformers.composite import freeze_what_sees_no_text, language_model_class
from trimtab.integrations.transformers.gates import word_of
from trimtab.integrations.transformers.lora import lora_config
from trimtab.integrations.transformers.quantized import allocate_params
from trimtab.integrations.transformers.quantized.prequantized import prequantized_format
from trimtab.integrations.transformers.quantized.quantizer import experts_in
from trimtab.integrations.transformers.summary import own_name
from trimtab.kernels.choose import get_backend
from trimtab.kernels.compiled import ACTIVATIONS
from trimtab.train.config import Mesh, TrainConfig
from trimtab.train.presets import PRESETS, byte_tokenizer, preset_config

RESUMS = "replicated_with_grad_allreduce"
"""A style of transformers' tp plans, of norms over a head: its hook sums `.grad`, earlier micro-batches included."""


def inspect(model: str, attn: str | None = None) -> Any:
    """Build the model on the meta device. Raises ConfigError for a path that is no MoE language model."""
    config = preset_config(model) if model in PRESETS else read_config(model)
    try:
        with torch.device("meta"):
            skeleton = language_model_class(config).from_config(config, attn_implementation=attn)
    except ConfigError as error:
        raise ConfigError(f"--model {model}: {error}") from None
    except (ValueError, ImportError, AttributeError) as error:
        if attn is not None:
            raise ConfigError(f"--attn {attn}: {first_line(error)}") from error
        raise ConfigError(f"--model {model}: not a causal language model ({first_line(error)})") from error
    freeze_what_sees_no_text(skeleton)
    if not experts_modules(skeleton):
        raise ConfigError(
            f"--model {model}: {type(skeleton).__name__} has no experts that transformers hands to an implementation; "
            "trimtab trains Mixture-of-Experts models whose experts module it does"
        )
    return skeleton


def num_experts(model: Any) -> int:
    """Of each layer; where layers have different numbers of experts, the greatest one that divides all."""
    return math.gcd(*(int(each.num_experts) for each in experts_modules(model).values()))  # type: ignore[arg-type]


def read_config(model: str) -> Any:
    from transformers import AutoConfig

    if not (Path(model) / "config.json").is_file():
        raise ConfigError(f"--model {model}: neither a folder with a config.json nor one of {', '.join(PRESETS)}")
    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"--model {model}: config.json cannot be used ({first_line(error)})") from error
    config.__dict__.pop("quantization_config", None)  # its weights are written out plain
    return config


def keeps_documents_apart(model: Any) -> bool:
    """True where masks and `position_ids` that begin anew keep documents of one row apart in every layer: not where a
    state or a convolution runs over the row, or keys are compressed or chosen for a block of it."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    mixes = any(isinstance(module, nn.Conv1d) for module in model.modules())
    return not mixes and kinds <= {"full_attention", "sliding_attention"}


def check_model(config: TrainConfig, model: Any, mesh: Mesh, tokenizer: Any) -> None:
    """Raise ConfigError for options that the model, its plans, its tokenizer or adapters on it do not allow."""
    name, rows = type(model).__name__, int(model.get_input_embeddings().num_embeddings)
    for kind, size in {"tp": mesh.tp, "ep": mesh.ep, "fsdp": mesh.fsdp * mesh.replicate}.items():
        if size > 1 and not getattr(model, f"{kind}_plan", None):
            raise ConfigError(f"--{kind} {size}: transformers has no {kind} plan for {name}; use --{kind} 1")
    text, plan = model.config.get_text_config(), tuple(model.tp_plan or ()) if mesh.tp > 1 else ()
    for part, field in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if any(key.endswith(part) for key in plan) and (heads := getattr(text, field, 0)) % mesh.tp:
            raise ConfigError(f"--tp {mesh.tp} does not divide {name}'s {heads} heads ({field})")
    if mesh.tp > 1 and config.grad_accum > 1 and RESUMS in (model.tp_plan or {}).values():
        raise ConfigError(
            f"--tp {mesh.tp} --grad-accum {config.grad_accum}: transformers' tp plan for {name} sums gradients of "
            "norms anew in every micro-batch, and they come out too large; use --grad-accum 1"
        )
    if config.replicate_experts != "off" and mesh.ep == 1:
        raise ConfigError(
            f"--replicate-experts {config.replicate_experts}: every rank has all experts (ep 1); raise --ep, or leave "
            "that off"
        )
    if len(tokenizer) > rows:
        raise ConfigError(
            f"--model {config.model}: its tokenizer has {len(tokenizer)} tokens, its embedding {rows} rows"
        )
    positions, seq_len = getattr(text, "max_position_embeddings", None), config.seq_len or 0
    if positions is not None and seq_len > positions:
        more = "" if config.model in PRESETS else ", or extend it in its config.json"
        raise ConfigError(
            f"--seq-len {seq_len}: {config.model} has {positions} positions (max_position_embeddings); use at most as "
            f"many{more}"
        )
    if config.lora:
        _check_adapters(config, model, mesh)


def check_sharded(mapping: Sequence[Any], skeleton: Any, mesh: Mesh) -> None:
    """Raise ConfigError for a checkpoint that transformers loads wrong where a rank has a part of each weight."""
    if mesh.fsdp * mesh.tp > 1 and (names := moved_rows(mapping)):
        raise ConfigError(
            f"--nproc {mesh.world}: transformers loads {names[0]} of {type(skeleton).__name__} wrong where a rank has "
            f"a part of it; give --fsdp 1 with --replicate {mesh.world}, or --nproc 1"
        )


def _check_adapters(config: TrainConfig, model: nn.Module, mesh: Mesh) -> None:
    for flag, size in (("--tp", mesh.tp), ("--replicate", mesh.replicate)):
        if size > 1 and config.lora_targets != "experts":
            raise ConfigError(
                f"--lora with {flag} {size}: peft sizes adapters of linear layers by one rank's shard then; use "
                f"--lora-targets experts, or {flag} 1"
            )
    if config.quantize and mesh.ep == 1 and mesh.tp > 1:
        raise ConfigError(f"--quantize with --tp {mesh.tp} and --ep 1: codes are sharded by expert alone; give --ep 2")
    _check_names(trained_skeleton(model, config))
    if config.model not in PRESETS:
        whole_model(model, Path(config.model))


def _check_names(model: Any) -> None:
    """Raise ConfigError for adapters that peft would not find again: it takes the names in its files through the
    renamings of the model's checkpoints, and some families' rename what has its name already."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    loaded = set_peft_model_state_dict(model, get_peft_model_state_dict(model, save_embedding_layers=False))
    if lost := [name.partition(".lora_")[0] for name in loaded.missing_keys if ".lora_" in name]:
        raise ConfigError(
            f"--lora: of adapters of {type(model.get_base_model()).__name__} peft renames those of "
            f"{own_name(lost[0])} and the like as it loads them, and would run without; leave them out of "
            "--lora-targets, or train without --lora"
        )


def load_tokenizer(model: str) -> Any:
    """Load the checkpoint's tokenizer, or the byte tokenizer of the presets. Raises ConfigError if there is none."""
    if model in PRESETS:
        return byte_tokenizer()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except Exception as error:  # whatever the many loaders raise, the folder has no tokenizer that opens
        raise ConfigError(f"--model {model}: no tokenizer that opens there ({first_line(error)})") from error


def with_adapters(model: Any, config: TrainConfig) -> Any:
    """The model with new adapters of peft's around it, the same on every rank, and everything else frozen."""
    from peft import get_peft_model

    torch.manual_seed(config.seed)
    meta = next(model.parameters()).is_meta
    return get_peft_model(model, _lora_config(model, config), low_cpu_mem_usage=meta)


def trained_skeleton(skeleton: Any, config: TrainConfig) -> Any:
    """The model of the run, on the meta device: with adapters and quantized experts where the run has them."""
    return with_adapters(_quantized_skeleton(skeleton, config), config) if config.lora else skeleton


def _lora_config(model: nn.Module, config: TrainConfig) -> Any:
    targets = [target.strip() for target in (config.lora_targets or "").split(",")]
    try:
        return lora_config(model, rank=config.lora or 0, alpha=config.lora_alpha, targets=targets)
    except ConfigError as error:
        raise ConfigError(f"--lora-targets {error}") from None


def experts_format(config: TrainConfig) -> str | None:
    """The format in which the run holds experts, None for plain weights. Raises ConfigError for none to keep."""
    from transformers import AutoConfig

    if config.quantize != "keep":
        return config.quantize
    found = None if config.model in PRESETS else prequantized_format(AutoConfig.from_pretrained(config.model))
    if found is None:
        raise ConfigError(
            f"--quantize keep: the experts of {config.model} are no codes that can be kept; use nf4 or int8"
        )
    return found


def packed(config: TrainConfig, skeleton: nn.Module, mesh: Mesh, planned: str = "") -> TrainConfig:
    """The options, and frozen experts packed unasked: on CPUs whose C++ reads them, in a layout that codes have. Says
    where only their sizes are against it. planned: for a run on such a device elsewhere; nothing is said."""
    free = config.lora and not config.quantize and (mesh.tp == 1 or mesh.ep > 1)
    on_cpu = planned == "cpu" or not (planned or torch.accelerator.is_available())
    experts: list[Any] = experts_in(skeleton) if free and on_cpu and config.kernels in ("auto", "cpu") else []
    known = all(not m.has_post_expert_norm and (word_of(m) or "-").split()[0] in ACTIVATIONS for m in experts)
    if not experts or not known or get_backend(config.kernels, torch.device("cpu")).name != "cpu":
        return config
    try:
        _quantized_skeleton(skeleton, chosen := replace(config, quantize="packed"))
    except ConfigError as error:
        if not planned and (not dist.is_initialized() or dist.get_rank() == 0):
            print(f"trimtab: experts are not packed: {error}", file=sys.stderr)
        return config
    return chosen


def _quantized_skeleton(skeleton: nn.Module, config: TrainConfig) -> nn.Module:
    """A copy of the model whose experts are what the run will hold. Raises ConfigError where they cannot be that."""
    model, name = deepcopy(skeleton), experts_format(config)
    try:
        for module in experts_in(model) if name else ():
            allocate_params(module.to(getattr(torch, config.dtype)), name or "")  # as it is loaded with adapters
    except ConfigError as error:
        raise ConfigError(f"--quantize {config.quantize}: {error}") from None
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


def whole_model(skeleton: Any, base: Path) -> tuple[str, str] | None:
    """The class of the model that `base` is a checkpoint of, and the name of the skeleton's base model in it, where
    `skeleton` is only the language model in it. Raises ConfigError where that class cannot be built."""
    import transformers

    if hasattr(skeleton, "part_of"):
        return type(skeleton).__name__, skeleton.base_model_prefix
    config = transformers.AutoConfig.from_pretrained(base, local_files_only=True)
    name = (config.architectures or [""])[0]
    if name == type(skeleton).__name__ or not hasattr(transformers, name):
        return None
    try:
        with torch.device("meta"):
            whole = getattr(transformers, name)._from_config(config)
    except Exception as error:  # whatever the many classes raise
        raise ConfigError(f"--lora: {name}, whose names adapters get, cannot be built ({first_line(error)})") from error
    kind = type(skeleton.base_model)
    found = [path for path, module in whole.named_modules() if type(module) is kind]
    return (name, found[0]) if len(found) == 1 else None
