"""Experts of transformers' models as codes: in place, or while a checkpoint is read, one tensor at a time.

    TrimtabExpertsConfig("nf4")         as `quantization_config=` of `from_pretrained`, once `register` was called
    quantize_experts(model, "nf4")      of a model that is there

Everything but the experts stays as it is. A module's weights become frozen parameters of uint8 of the same names, codes
of [E, out, in] whichever way the module has them, with `<name>_scales` beside them.

Legend: E experts of this rank, out and in the outputs and inputs of a weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from trimtab.errors import ConfigError
from trimtab.experts.quantized import FORMATS, Codes, quantized
from trimtab.parallel.meshes import local_part

METHOD = "trimtab_experts"
INITIALIZED = "_is_hf_initialized"
"""By this mark transformers leaves a module's parameters as they are."""
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


class TrimtabExpertsConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Routed experts in a format of `trimtab.experts.quantized` that there is an encoder for: "nf4" or "int8".

    Raises:
        ConfigError: there is no such format.
    """

    def __init__(self, format: str = "nf4", **kwargs: Any) -> None:
        known = [name for name, row in FORMATS.items() if row.quantize]
        if format not in known:
            raise ConfigError(f"experts can be quantized to {known}, not to {format!r}")
        self.quant_method = METHOD
        self.format = format


class ExpertsQuantizer(HfQuantizer):  # type: ignore[misc]
    """What transformers asks while it loads a model with a `TrimtabExpertsConfig`."""

    quantization_config: TrimtabExpertsConfig

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Raises ConfigError before anything is read: the checkpoint holds codes of this kind already."""
        if self.pre_quantized:
            raise ConfigError("a checkpoint whose experts are trimtab's codes cannot be loaded by from_pretrained yet")

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        path, _, name = param_name.rpartition(".")
        return name in WEIGHTS and is_experts(model.get_submodule(path))

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self.quantization_config.format)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        """What is not quantized is, and adapters are."""
        return True


class _Quantize(ConversionOps):  # type: ignore[misc]
    def __init__(self, name: str) -> None:
        self.name = name

    def convert(
        self, input_dict: dict[str, Any], *, model: nn.Module, full_layer_name: str,
        missing_keys: set[str] | None = None, **kwargs: Any,
    ) -> dict[str, Tensor]:  # fmt: skip
        rest = {}
        for key, value in input_dict.items():
            path, _, weight = key.rpartition(".")
            if weight not in WEIGHTS:
                rest[key] = value
                continue
            module = model.get_submodule(path)
            hold_codes(module, weight, value[0] if isinstance(value, list) else value, self.name)
            setattr(module, INITIALIZED, True)
            if missing_keys is not None:
                missing_keys.discard(key)
        return rest


def add_quantizer() -> None:
    """Make the config known to `from_pretrained`. Again is harmless."""
    AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, TrimtabExpertsConfig)
    AUTO_QUANTIZER_MAPPING.setdefault(METHOD, ExpertsQuantizer)


def is_experts(module: nn.Module) -> bool:
    """Whether it is one of the modules that an experts implementation runs."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed") and hasattr(module, "down_proj")


def quantize_experts(model: nn.Module, name: str = "nf4") -> nn.Module:
    """Put codes in the place of all routed experts' weights of a model, layer by layer; returns the model.

    Raises:
        ConfigError: there is no encoder for the format, its blocks do not divide the experts' inputs, or the model has
            no experts modules of transformers.
    """
    found = [module for module in model.modules() if is_experts(module)]
    if not found:
        raise ConfigError(f"{type(model).__name__} has no experts modules of transformers to quantize")
    for module in found:
        for weight in WEIGHTS:
            value = getattr(module, weight, None)
            if isinstance(value, Tensor) and value.is_floating_point():
                hold_codes(module, weight, local_part(value), name)
    return model


def hold_codes(module: nn.Module, weight: str, value: Tensor, name: str) -> None:
    """Codes of `value`, [E, out, in] or as the module has it, as frozen parameters of the module."""
    codes, scales = [], []
    for expert in value.detach():  # one by one: what a format makes on the way is in float32
        some = quantized(expert.t() if module.is_transposed else expert, name)
        codes.append(some[0])
        scales.append(some[1])
    delattr(module, weight)
    for key, parts in ((weight, codes), (f"{weight}_scales", scales)):
        module.register_parameter(key, nn.Parameter(torch.stack(parts), requires_grad=False))
    module.codes_of_experts = name, value.dtype  # type: ignore[assignment]


def codes_of(module: nn.Module, up: str) -> Codes | None:
    """What an experts module's weights are codes of: ours, or those of transformers' FP8 experts with float scales."""
    ours: Any = getattr(module, "codes_of_experts", None)
    if ours is not None:
        name, dtype = ours
        scales = (getattr(module, f"{weight}_scales") for weight in (up, "down_proj"))
        return Codes(format=name, up=next(scales), down=next(scales), dtype=dtype)
    grids = [getattr(module, f"{weight}_scale_inv", None) for weight in (up, "down_proj")]
    blocks, e4m3 = getattr(module, "block_size", None), getattr(module.down_proj, "dtype", None) is torch.float8_e4m3fn
    floats = all(isinstance(grid, Tensor) and grid.dtype is torch.float32 for grid in grids)
    if floats and e4m3 and tuple(blocks or ()) == (128, 128):
        dtype = getattr(module.config, "dtype", None) or torch.bfloat16
        return Codes(format="fp8", up=grids[0], down=grids[1], dtype=dtype)  # type: ignore[arg-type]
    return None
