"""A model on the ranks: built by transformers and by us, and then its weights read, or not, for who wants no values."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers.distributed import DistributedConfig
from transformers.utils.loading_report import LoadStateDictInfo

import trimtab.integrations.transformers
from trimtab.checkpoint.ranks import on_every_rank
from trimtab.errors import ConfigError
from trimtab.integrations.transformers.composite import freeze_what_sees_no_text, language_model_class
from trimtab.integrations.transformers.quantized.quantizer import METHOD, QuantizedExpertsConfig
from trimtab.train.config import Mesh, TrainConfig
from trimtab.train.models import experts_format, read_config, with_adapters

IMPLEMENTATION = "trimtab"


def load_model(path: Path, config: TrainConfig, mesh: Mesh) -> Any:
    """Load a checkpoint folder onto this rank's place in the mesh, with trimtab's experts and exchange.

    Every rank must call. Raises ConfigError for a checkpoint that lacks weights, or whose weights are not finite.
    """
    options = _options(config, mesh, IMPLEMENTATION, "alltoall")
    if config.quantize == "keep":
        del options["quantization_config"]  # the checkpoint's own
    model, report = language_model_class(read_config(str(path))).from_pretrained(
        path, local_files_only=True, output_loading_info=True, **options
    )
    # transformers fills these with random numbers, which would pass for a checkpoint that learns badly.
    if absent := sorted(report["missing_keys"]):
        raise ConfigError(f"--model {config.model}: the checkpoint lacks {len(absent)} weights, among them {absent[0]}")
    check_finite(model, config.model)
    return _as_trained(model, config)


def build_model(source: Any, config: TrainConfig, mesh: Mesh, *, transport: str = "alltoall") -> Any:
    """Build what `load_model` loads of a checkpoint with the configuration `source`, on the meta device: nothing is
    read. With the adapters that `config`, which is resolved, asks for, and in a group of as many ranks as the mesh has.

    transport: by a name that `trimtab.integrations.transformers.register` knows.
    """
    nothing = LoadStateDictInfo(set(), set(), set(), [], {}, set())
    unread = {
        "_load_pretrained_model": staticmethod(lambda *_: (nothing, None)),
        "_finalize_model_loading": staticmethod(lambda *_: nothing),
    }
    whole, source = language_model_class(source), deepcopy(source)
    if hasattr(whole, "_model_mapping"):
        whole = whole._model_mapping[type(source)]
        if whole.config_class is source.sub_configs.get("text_config"):
            source = source.get_text_config()
    kind: Any = type(whole.__name__, (whole,), {**unread, "__module__": whole.__module__})
    name = f"{IMPLEMENTATION} {transport} {config.tolerance} {config.copy_cost} {config.kernels}"
    model = kind.from_pretrained(None, config=source, state_dict={}, **_options(config, mesh, name, transport))
    return finished(_as_trained(model, config), config)


def finished(model: Any, config: TrainConfig) -> Any:
    """A model that was loaded, with masks that keep documents apart and the adapters that are asked for."""
    mask_by_positions(model)
    return with_adapters(model, config) if config.lora else model


def _options(config: TrainConfig, mesh: Mesh, name: str, transport: str) -> dict[str, Any]:
    """Of `from_pretrained`. Registers our experts and our exchange under a name."""
    trimtab.integrations.transformers.register(
        name, transport=transport, replicate_experts=config.tolerance, copy_cost=config.copy_cost,
        kernels=config.kernels,
    )  # fmt: skip
    options: dict[str, Any] = {}
    if held := experts_format(config):
        options["quantization_config"] = QuantizedExpertsConfig(held, quant_method=METHOD)
    if mesh.world > 1:
        options["distributed_config"] = DistributedConfig(
            ep_size=mesh.ep,
            fsdp_size=mesh.fsdp,
            tp_size=mesh.tp,
            dp_replicate_size=mesh.replicate,
            ep_implementation=name,
            fsdp_mixed_precision=config.dtype == "bfloat16" and not config.lora,  # it is loaded so
        )
    return options | {
        "dtype": torch.bfloat16 if config.lora and config.dtype == "bfloat16" else torch.float32,  # none is trained
        "experts_implementation": name,
        "attn_implementation": config.attn,
    }


def _as_trained(model: Any, config: TrainConfig) -> Any:
    freeze_what_sees_no_text(model)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def check_finite(model: Any, name: str) -> None:
    """Raise ConfigError, on every rank, for weights that no training can put right."""

    def bad() -> list[str]:
        local = ((n, p.to_local() if hasattr(p, "to_local") else p) for n, p in model.named_parameters())
        return [n for n, tensor in local if not bool(tensor.isfinite().all())]

    if found := sorted({n for rank in on_every_rank(bad, None) for n in rank}):
        raise ConfigError(
            f"--model {name}: NaN or infinity in {len(found)} weights of the checkpoint: {', '.join(found[:3])}"
        )


def mask_by_positions(model: Any) -> None:
    """Have a model's masks made from `position_ids`: not every one hands them on to the functions that do, and GPT-OSS
    and AFMoE would let documents of one row see each other."""
    from transformers.masking_utils import create_masks_for_generate

    def with_masks(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        positions = kwargs.get("position_ids")
        if positions is None or kwargs.get("attention_mask") is not None:
            return args, kwargs
        embedded = torch.empty(*positions.shape, 0, dtype=module.dtype, device=positions.device)
        masks = create_masks_for_generate(module.config, embedded, None, None, positions)
        return args, {**kwargs, "attention_mask": masks}

    model.get_decoder().base_model.register_forward_pre_hook(with_masks, with_kwargs=True)
