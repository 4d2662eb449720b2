"""Quantized experts of transformers' models: in place, or while a checkpoint is read, one tensor at a time.

    QuantizedExpertsConfig("nf4")       as `quantization_config=` of `from_pretrained`, once `register` was called
    quantize_experts(model, "nf4")      of a model that is there; `dequantize_experts(model)` is the way back

Official checkpoints in FP8 and MXFP4 stay as they are, see `prequantized`. Everything but the experts stays as it is,
or is quantized by bitsandbytes: `QuantizedExpertsConfig(rest=BitsAndBytesConfig(...))`, or a model that was loaded so.
`save_pretrained` writes codes and scales as the model has them, codes by names of their own: `down_proj_codes`; in the
place of packed weights the weights, in a checkpoint that says nothing of them.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, PrefixChange
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING, AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from trimtab.checkpoint.state import is_transformers_experts
from trimtab.errors import ConfigError
from trimtab.experts.quantized import FORMATS, encoded, in_huge_pages
from trimtab.integrations.transformers import quantized as on_module
from trimtab.integrations.transformers.experts import check_ours, keep_others_out
from trimtab.integrations.transformers.quantized import conversion
from trimtab.parallel.meshes import local_part

METHOD = "trimtab_experts"
BESIDE = "bitsandbytes"  # for linear layers


class QuantizedExpertsConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Routed experts in a format of `trimtab.experts.quantized`, as `quantization_config=` of `from_pretrained`.

    Args:
        format: "nf4", "int8" or "packed" for weights that are read and encoded; a checkpoint whose codes were saved may
            say another.
        modules_to_not_convert: experts modules, by the ends of their names, that keep their weights.
        rest: transformers' `BitsAndBytesConfig`, or what a file has of it, for linear layers.
        kwargs: as saved.

    Raises:
        ConfigError: there is no such format, or no encoder for it, or another kind of config for the rest.
    """

    def __init__(
        self, format: str = "nf4", modules_to_not_convert: list[str] | None = None, rest: Any = None, **kwargs: Any
    ) -> None:
        known = list(FORMATS) if "quant_method" in kwargs else encoded()  # as saved, or asked for
        if format not in known:
            raise ConfigError(f"experts can be quantized to {known}, not to {format!r}")
        self.quant_method = METHOD
        self.format = format
        self.modules_to_not_convert = modules_to_not_convert
        self.rest = rest if rest is None or isinstance(rest, dict) else rest.to_dict()
        if self.rest is not None:
            check_rest(self.rest.get("quant_method"))


class ExpertsQuantizer(HfQuantizer):  # type: ignore[misc]
    """transformers' hooks while it loads or saves a model with a `QuantizedExpertsConfig`. rest: the quantizer of its
    linear layers, which has the same hooks."""

    quantization_config: QuantizedExpertsConfig
    keeps = True

    def __init__(self, config: QuantizedExpertsConfig, rest: HfQuantizer | None = None, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        if rest is None and config.rest is not None:
            rest = AutoHfQuantizer.from_config(dict(config.rest), pre_quantized=self.pre_quantized)
        self.rest = rest or Nothing(config)
        if self.rest.quantization_config is not config:
            config.rest = self.rest.quantization_config.to_dict()
        for hook in ("validate_environment", "update_device_map", "adjust_max_memory"):
            setattr(self, hook, getattr(self.rest, hook))

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        """Raises ConfigError before anything is read: no experts, blocks that do not fit, a layout without codes."""
        self.rest._process_model_before_weight_loading(model, **kwargs)
        found = experts_in(model, self.quantization_config.modules_to_not_convert)
        allocate_experts(model, found, self.quantization_config.format)

    def update_parallel_plan(self, model: nn.Module, plan: dict[str, str]) -> None:
        on_module.plan_scales(model, plan)

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        module, name = conversion.owner(model, param_name)
        ours = not self.pre_quantized and name in on_module.WEIGHTS and hasattr(module, on_module.MARK)
        return ours or bool(self.rest.param_needs_quantization(model, param_name, **kwargs))

    def get_quantize_ops(self) -> ConversionOps:
        return conversion.QuantizeWhole(self.quantization_config.format, self.rest.get_quantize_ops())

    def update_weight_conversions(self, weight_conversions: list[Any], model: nn.Module) -> list[Any]:
        if self.pre_quantized:  # codes are saved as the model has them
            kept = [converter for converter in weight_conversions if not conversion.makes_quantized(converter, model)]
            return [conversion.NamedCodes(), *self.rest.update_weight_conversions(kept, model)]
        return conversion.quantizing(weight_conversions, model, self.quantization_config.format)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        on_module.check_all_read(model)
        self.rest._process_model_after_weight_loading(model, **kwargs)
        mark_quantized(model, self.quantization_config, self.rest)
        return model

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[Any, dict[str, Any]]:
        return conversion.NamedCodes.of(model), {}

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        self.rest._dequantize(model, dtype=dtype)
        return dequantize_experts(model, dtype)

    def is_serializable(self) -> bool:
        return True

    is_trainable = property(lambda self: bool(self.rest.is_trainable))
    is_qat_trainable = property(lambda self: bool(self.rest.is_qat_trainable))


class Nothing(HfQuantizer):  # type: ignore[misc]
    """The quantizer of the rest where that stays as it is."""

    is_trainable = is_qat_trainable = True

    def get_quantize_ops(self) -> None:
        """None."""

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        return model

    def is_serializable(self) -> bool:
        return True


@cache
def add_quantizer() -> None:
    """Make the config known to `from_pretrained`, and packed experts to `save_pretrained`. Again is harmless."""
    AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, QuantizedExpertsConfig)
    AUTO_QUANTIZER_MAPPING.setdefault(METHOD, ExpertsQuantizer)
    PreTrainedModel.save_pretrained = _saving_weights(PreTrainedModel.save_pretrained)


def _saving_weights(theirs: Any) -> Any:
    """transformers' `save_pretrained`, and of packed experts, wherever they are in the model, that of weights."""

    @wraps(theirs)
    def save_pretrained(
        self: Any, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, *more: Any, **options: Any
    ) -> Any:
        quantizer: Any = getattr(self, "hf_quantizer", None)
        rest, layout = getattr(quantizer, "rest", quantizer), getattr(self.config, "distributed_config", None)
        peft = getattr(self, "_hf_peft_config_loaded", False)  # which is saved alone
        if not peft and any(hasattr(module, on_module.MARK) for module in self.modules()):
            on_module.check_in_memory(self)
        if packed := on_module.packed_in(self, kept=peft or getattr(quantizer, "keeps", False)):
            scales = [p.numel() for m in packed for name, p in m.named_parameters() if name.endswith(on_module.SCALES)]
            self.num_parameters = lambda: type(self).num_parameters(self) - sum(scales)
            self.hf_quantizer = None if isinstance(rest, Nothing) else rest
            if state_dict is None and not peft and layout is not None and layout.dp_size > 1:
                state_dict = {}  # transformers gathers another
        try:
            with on_module.as_weights(self, state := state_dict and dict(state_dict)):
                return theirs(self, save_directory, is_main_process, state, *more, **options)
        finally:
            if packed:
                self.hf_quantizer = quantizer
                del self.num_parameters

    return save_pretrained


def experts_in(model: nn.Module, skipped: list[str] | None = None) -> list[nn.Module]:
    """A model's experts modules, but those that a checkpoint or a user skips. Raises ConfigError if it has none."""
    named = [(name, module) for name, module in model.named_modules() if is_transformers_experts(module)]
    if not named:
        raise ConfigError(f"{type(model).__name__} has no experts modules of transformers to quantize")
    return [module for name, module in named if should_convert_module(name, skipped)]


def allocate_experts(model: nn.Module, modules: list[nn.Module], name: str) -> None:
    """Parameters for codes of a format in the place of the weights of a model that is about to be read.

    Raises ConfigError if nothing of ours would run them, or the layout is none that codes have.
    """
    check_ours(modules, name)
    layout: Any = getattr(model.config, "distributed_config", None)
    if layout is not None and layout.tp_size > 1 and layout.ep_size == 1:
        raise ConfigError("experts of codes are sharded by expert alone: pass ep_size= beside tp_size=")
    if layout is not None and getattr(layout, "fsdp_mixed_precision", False):
        raise ConfigError("fsdp_mixed_precision would round the scales of codes: pass dtype='bfloat16' instead")
    for module in modules:
        on_module.allocate_params(module, name)
        module.register_forward_pre_hook(keep_others_out)
        module._is_hf_initialized = True  # type: ignore[assignment]  # what was not read is not drawn


def check_rest(method: Any) -> None:
    """Raise ConfigError if linear layers that are quantized so do not go beside experts of codes."""
    known = getattr(method, "value", method)
    if known != BESIDE:
        raise ConfigError(
            f"quantized by {known}: experts as codes go beside {BESIDE}, QuantizedExpertsConfig(rest="
            "BitsAndBytesConfig(load_in_4bit=True)), or beside plain layers; load the model without it"
        )


def mark_quantized(model: Any, config: QuantizedExpertsConfig, rest: HfQuantizer | None = None) -> None:
    """Mark a model that has codes as one: its config says so, and `save_pretrained` writes them as they are; but packed
    ones as the weights that they are. rest: the quantizer of its linear layers."""
    plain = [n for n, m in model.named_modules() if is_transformers_experts(m) and not hasattr(m, on_module.MARK)]
    config.modules_to_not_convert = [name.removeprefix(f"{model.base_model_prefix}.") for name in plain] or None
    for module in [module for module in model.modules() if hasattr(module, on_module.MARK)]:
        for weight, codes in on_module.weights_in(module):
            module.get_parameter(weight + on_module.SCALES).requires_grad_(False)  # as transformers reads what floats
            in_huge_pages(local_part(codes))
    quantizer = ExpertsQuantizer(config, rest, pre_quantized=True)
    model.hf_quantizer, model.is_quantized, model.quantization_method = quantizer, True, METHOD
    lossless = FORMATS[config.format].decode is not None
    model.config.quantization_config = quantizer.rest.quantization_config if lossless else config
    if lossless and isinstance(quantizer.rest, Nothing):
        del model.config.quantization_config
    used: Any = getattr(model, "_weight_conversions", None)
    if used is None:
        used = [c for c in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(c, PrefixChange)]
    model._weight_conversions = [
        conversion.unquantized(converter)
        for converter in used
        if not isinstance(converter, conversion.NamedCodes)
        and (lossless or not conversion.makes_quantized(converter, model))
        and not any(getattr(op, "hf_quantizer", None) is quantizer.rest for op in getattr(converter, "operations", ()))
    ]


def quantize_experts(model: nn.Module, name: str = "nf4") -> nn.Module:
    """Put codes in the place of all routed experts' weights of a model, layer by layer; returns the model.

    Args:
        model: of transformers.
        name: "nf4", "int8" or "packed".

    Raises:
        ConfigError: there is no encoder for the format, its blocks do not divide the experts' weights, or the model has
            no experts modules of transformers, has codes already, is sharded by FSDP, has experts that are offloaded or
            that another implementation runs, or linear layers that are quantized otherwise than by bitsandbytes.
    """
    found, config = experts_in(model), QuantizedExpertsConfig(name)
    on_module.check_in_memory(model)
    theirs: Any = getattr(model, "hf_quantizer", None)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError("experts are quantized before fully_shard, or while from_pretrained reads them")
    if any(on_module.codes_of(module, weight) for module in found for weight, _ in on_module.weights_in(module)):
        raise ConfigError(f"the experts of {type(model).__name__} are codes already")
    check_ours(found, name)
    if theirs is not None:
        check_rest(theirs.quantization_config.quant_method)
    for module, weights in [(module, on_module.check_fits(module, name)) for module in found]:  # all before the first
        for weight, *_ in weights:
            on_module.quantize_param(module, weight, name)
        module.register_forward_pre_hook(keep_others_out)
    if isinstance(model, PreTrainedModel):
        mark_quantized(model, config, theirs)
    return model


def dequantize_experts(model: nn.Module, dtype: torch.dtype | str | None = None) -> nn.Module:
    """Put the weights that codes stand for back in their place, layer by layer; returns the model. Also under peft,
    which can then merge.

    Args:
        dtype: of the weights; by default the one that they had.

    Raises:
        ConfigError: the model has no experts of codes, is sharded by FSDP, or has experts that accelerate offloads.
    """
    found = [module for module in model.modules() if hasattr(module, on_module.MARK)]
    if not found:
        raise ConfigError(f"{type(model).__name__} has no experts of codes")
    on_module.check_in_memory(model)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError("codes that FSDP shards are not taken out: save the model, and load it without FSDP")
    to: torch.dtype | None = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # a saved config has its name
    for module in found:
        on_module.dequantize_params(module, to)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and isinstance(getattr(module, "hf_quantizer", None), HfQuantizer):
            rest: Any = getattr(module.hf_quantizer, "rest", None)
            module.hf_quantizer.remove_quantization_config(module)
            if rest is not None and not isinstance(rest, Nothing):  # the linear layers stay as they are
                module.hf_quantizer, module.is_quantized = rest, True
                module.quantization_method = rest.quantization_config.quant_method
                module.config.quantization_config = rest.quantization_config
    return model
