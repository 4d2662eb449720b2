"""Official FP8 and MXFP4 checkpoints whose experts stay quantized, where `experts_implementation` is ours.

Subclasses of transformers' quantizers for both methods. With another implementation, or `dequantize=True` in the
config that a user passes, they do what transformers' do. Kept are

    FP8 in blocks of 128 x 128, float or ue8m0 scales,     where transformers has no kernels for FP8 (a CPU, a GPU
    FP4 of DeepSeek's fp4 experts                          before 8.9): the rest becomes bfloat16, as ever
    MXFP4 as gpt-oss's                                     anywhere: transformers' own experts of it do not train

and saved: MXFP4 as it was read, FP8 as codes of `QuantizedExpertsConfig`, since the rest is no longer FP8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import WeightConverter
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from trimtab.checkpoint.state import is_transformers_experts
from trimtab.errors import ConfigError
from trimtab.integrations.transformers.experts import is_ours
from trimtab.integrations.transformers.quantized import WEIGHTS, check_all_read, conversion, plan_scales
from trimtab.integrations.transformers.quantized import quantizer as quantizing

FP8_METHODS = ("fp8", "mxfp8")
MXFP4_METHOD = "mxfp4"


class _Prequantized:
    """Mixed into a quantizer of transformers: its check of the machine waits until the model is known."""

    quantization_config: Any
    pre_quantized: bool
    keeps = False
    asked: tuple[Any, dict[str, Any]] | None = None

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if self.pre_quantized and not self.quantization_config.dequantize:
            self.asked = args, kwargs
        else:
            super().validate_environment(*args, **kwargs)  # type: ignore[misc]

    def decide(self, model: nn.Module, wanted: bool) -> None:
        """Set `keeps` if this model's experts stay quantized; if not, run transformers' check of the machine."""
        experts = [module for module in model.modules() if is_transformers_experts(module)]
        self.keeps = self.asked is not None and wanted and any(is_ours(module) for module in experts)
        if self.asked is not None and not self.keeps:
            super().validate_environment(*self.asked[0], **self.asked[1])  # type: ignore[misc]

    def update_parallel_plan(self, model: nn.Module, plan: dict[str, str]) -> None:
        super().update_parallel_plan(model, plan)  # type: ignore[misc]
        if self.keeps:
            plan_scales(model, plan)


class PrequantizedFP8(_Prequantized, FineGrainedFP8HfQuantizer):  # type: ignore[misc]
    """Blocks of 128 x 128 of e4m3, or DeepSeek's fp4 experts, as they are."""

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        """Raises ConfigError where codes cannot stay: other blocks than 128 x 128, or such as straddle gate and up."""
        self.decide(model, wanted=not runs_fp8())
        if self.keeps:
            self.quantization_config.dequantize = True  # the rest
        super()._process_model_before_weight_loading(model, **kwargs)
        if not self.keeps:
            return
        modules = quantizing.experts_in(model, self.modules_to_not_convert)
        for module in modules:
            if bool(module.is_transposed) or not module.is_concatenated:
                raise ConfigError(refusal(f"{type(module).__name__} holds its weights transposed or interleaved"))
        try:
            quantizing.allocate_experts(model, modules, self.own_format())
        except ConfigError as error:
            raise ConfigError(refusal(str(error))) from error

    def own_format(self) -> str:
        """Raises ConfigError where no format of ours has such blocks."""
        found = prequantized_format(self)
        if found is None:
            blocks = self.quantization_config.weight_block_size
            raise ConfigError(f"experts in FP8 are kept in blocks of 128 x 128, and this checkpoint has {blocks}")
        return found

    def update_weight_conversions(self, weight_conversions: list[Any], model: nn.Module) -> list[Any]:
        if not self.keeps:
            return list(super().update_weight_conversions(weight_conversions, model))
        experts = [converter for converter in weight_conversions if conversion.makes_quantized(converter, model)]
        rest = [converter for converter in weight_conversions if converter not in experts]
        kept = [conversion.keeping_quantized(converter, self) for converter in experts]
        made = {target for converter in experts for target in converter._original_target_patterns}
        for name in WEIGHTS:  # a family without converters has its weights stacked
            stacked = rf"\.experts\.{name}"
            if not any(target.endswith(name) for target in made):
                sources = [stacked, f"{stacked}_scale_inv"]
                kept.append(WeightConverter(sources, f".experts.{name}", [conversion.KeepQuantized(self)]))
        return kept + list(super().update_weight_conversions(rest, model))

    def postprocess_model(self, model: nn.Module, **kwargs: Any) -> Any:
        done = super().postprocess_model(model, **kwargs)
        if self.keeps:
            check_all_read(model)
            config = quantizing.QuantizedExpertsConfig(self.own_format(), quant_method=quantizing.METHOD)
            quantizing.mark_quantized(model, config)
        return done


class PrequantizedMXFP4(_Prequantized, Mxfp4HfQuantizer):  # type: ignore[misc]
    """gpt-oss's blocks and scales, as they are."""

    def _process_model_before_weight_loading(self, model: nn.Module, use_kernels: bool = False, **kwargs: Any) -> None:
        self.decide(model, wanted=True)
        if not self.keeps:
            super()._process_model_before_weight_loading(model, use_kernels=use_kernels, **kwargs)
            return
        self.modules_to_not_convert = self.get_modules_to_not_convert(
            model, self.quantization_config.modules_to_not_convert, model._keep_in_fp32_modules
        )
        quantizing.allocate_experts(model, quantizing.experts_in(model, self.modules_to_not_convert), "mxfp4")

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        return not self.keeps and bool(super().param_needs_quantization(model, param_name, **kwargs))

    def get_weight_conversions(self) -> list[Any]:
        if not self.keeps:
            return list(super().get_weight_conversions())
        names = (f".experts.{name}" for name in WEIGHTS)
        return [WeightConverter(f"{name}_blocks", name, [conversion.FlattenBlocks(self)]) for name in names]

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[Any, dict[str, Any]]:
        return (None, {}) if self.keeps else super().get_state_dict_and_metadata(model)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> Any:
        check_all_read(model)
        return super()._process_model_after_weight_loading(model, **kwargs)

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        return quantizing.dequantize_experts(model, dtype)

    @property
    def is_trainable(self) -> bool:
        return self.keeps or bool(super().is_trainable)

    is_qat_trainable = property(lambda self: self.keeps)


def add_prequantized() -> None:
    """Take the places of transformers' quantizers for both methods. Again is harmless."""
    for method, theirs, ours in (
        *((method, FineGrainedFP8HfQuantizer, PrequantizedFP8) for method in FP8_METHODS),
        (MXFP4_METHOD, Mxfp4HfQuantizer, PrequantizedMXFP4),
    ):
        if AUTO_QUANTIZER_MAPPING.get(method) is theirs:
            AUTO_QUANTIZER_MAPPING[method] = ours


def prequantized_format(config: Any) -> str | None:
    """The format of `trimtab.experts.quantized` in which `from_pretrained` keeps a checkpoint's experts, by its config;
    None if they are plain weights, or are dequantized."""
    given: Any = getattr(config, "quantization_config", None) or {}
    given = given if isinstance(given, dict) else given.to_dict()
    method = getattr(given.get("quant_method"), "value", given.get("quant_method"))
    if method == quantizing.METHOD:
        return str(given["format"])
    if method == MXFP4_METHOD or (method in FP8_METHODS and given.get("expert_dtype") == "fp4"):
        return "mxfp4"
    square = tuple(given.get("weight_block_size") or ()) == (128, 128)
    return "fp8" if method in FP8_METHODS and square else None


def runs_fp8() -> bool:
    """True if transformers has kernels for FP8 on this machine."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_capability() >= (8, 9)
    return torch.xpu.is_available()


def refusal(why: str) -> str:
    return f"{why}: load it with quantization_config=FineGrainedFP8Config(dequantize=True), or quantize what that gives"
