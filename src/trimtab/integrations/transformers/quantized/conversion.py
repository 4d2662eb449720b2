"""Codes and scales from a checkpoint's tensors, one weight at a time: steps of transformers' `WeightConverter`s.

A family's converters merge the weights of single experts, [out, in] each, into [E, out, in]. Codes and scales go
through the same merge side by side, since its steps leave rows whole. So a matrix is quantized as soon as it is read,
and a layer's weights in bfloat16 are never in memory at once.

Legend: E experts of this rank, out and in the outputs and inputs of a weight.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import core_model_loading as loading

from trimtab.errors import ConfigError
from trimtab.experts.quantized import FORMATS
from trimtab.integrations.transformers import quantized as on_module

Tensors = dict[str, Any]
"""A tensor, or a list of them, by a source's pattern or a weight's name."""
STACK = (loading.MergeModulelist, loading.Concatenate, loading.ErnieFuseAndSplitTextVisionExperts)
"""Steps that leave blocks of rows whole; `Interleave` leaves single rows, `Transpose` squares."""
SCALE_INV = "_scale_inv"
NO_WEIGHT = "activation_scale"
PAGE_OUT = 21
"""Linux's MADV_PAGEOUT: changed pages are kept, so a wrong guess costs time and nothing else."""


class Quantize(loading.ConversionOps):  # type: ignore[misc]
    """Weights into codes of a format, by single matrices if the family's steps allow it, then the steps."""

    supports_many_to_many = True

    def __init__(self, name: str, steps: Sequence[loading.ConversionOps] = ()) -> None:
        self.name, self.steps = name, steps

    def convert(self, input_dict: Tensors, *, model: nn.Module, full_layer_name: str, **kwargs: Any) -> Tensors:
        kwargs |= {"model": model, "full_layer_name": full_layer_name}
        module, weight = owner(model, full_layer_name)
        if not hasattr(module, on_module.MARK):  # this module keeps its weights
            return run(self.steps, input_dict, kwargs)
        name, steps = on_module.format_of(module, weight, self.name), self.steps
        whole = STACK if FORMATS[name].outs > 1 else (*STACK, loading.Interleave)
        read = all(isinstance(step, whole) for step in steps) and not module.is_transposed  # and not made here
        if not read:
            turned = with_known_transposes(steps, input_dict, module, weight)
            input_dict, steps = run(turned, input_dict, kwargs), ()
        codes, scales = Tensors(), Tensors()
        for key in list(input_dict):
            tensors = listed(input_dict.pop(key))
            codes[key], scales[key] = [], []
            while tensors:
                matrix = tensors.pop(0)
                pair = on_module.quantize_matrices(matrix, name, transposed=bool(module.is_transposed))
                if read:
                    _page_out(matrix)
                codes[key].append(pair[0])
                scales[key].append(pair[1])
        return _params(run(steps, codes, kwargs), run(steps, scales, kwargs))


class QuantizeWhole(loading.ConversionOps):  # type: ignore[misc]
    """Whole weights of modules into codes of a format; codes, with scales, pass. rest: for those of no experts."""

    def __init__(self, name: str, rest: loading.ConversionOps | None = None) -> None:
        self.name, self.rest = name, rest

    def convert(self, input_dict: Tensors, *, model: nn.Module, **kwargs: Any) -> Tensors:
        made: Tensors = {}
        for key, t in input_dict.items():
            module, weight = owner(model, key)
            made[key] = first(t)
            if not hasattr(module, on_module.MARK):
                made |= {} if self.rest is None else self.rest.convert({key: t}, model=model, **kwargs)
            elif weight in on_module.WEIGHTS and key + on_module.SCALES not in input_dict:
                made |= Quantize(self.name).convert({key: t}, model=model, full_layer_name=key, target_patterns=[key])
        return made


class NamedCodes(loading.WeightRenaming):  # type: ignore[misc]
    """Codes by their name in files, to the name that a module has them by; `save_pretrained` does not come by here."""

    def __init__(self) -> None:
        super().__init__(rf"({'|'.join(on_module.WEIGHTS)}){on_module.CODES}", r"\1")

    @staticmethod
    def of(model: nn.Module) -> Tensors:
        """The model's state by its names in files. Raises ConfigError where something has cast codes or scales."""
        coded = [(path, module) for path, module in model.named_modules() if hasattr(module, on_module.MARK)]
        every = [(path, module, name) for path, module in coded for name, _ in on_module.weights_in(module)]
        named = {f"{path}.{name}" for path, module, name in every if on_module.codes_of(module, name)}
        return {key + on_module.CODES * (key in named): tensor for key, tensor in model.state_dict().items()}


class KeepQuantized(loading.ConversionOps):  # type: ignore[misc]
    """Codes and scales of a checkpoint as they are, each through the family's steps."""

    supports_many_to_many = True

    def __init__(self, hf_quantizer: object, steps: Sequence[loading.ConversionOps] = ()) -> None:
        self.hf_quantizer = hf_quantizer  # transformers looks for this name before it casts what it reads
        self.steps = steps

    def convert(self, input_dict: Tensors, *, model: nn.Module, full_layer_name: str, **kwargs: Any) -> Tensors:
        kwargs |= {"model": model, "full_layer_name": full_layer_name}
        module, weight = owner(model, full_layer_name)
        ends = (SCALE_INV, NO_WEIGHT)
        codes = {key: listed(value) for key, value in input_dict.items() if not key.endswith(ends)}
        scales = {key.removesuffix(SCALE_INV): listed(t) for key, t in input_dict.items() if key.endswith(SCALE_INV)}
        kwargs["source_patterns"] = list(codes)
        if not hasattr(module, on_module.MARK):
            dtype = getattr(module, weight).dtype
            return run(self.steps, {key: [t.to(dtype) for t in ts] for key, ts in codes.items()}, kwargs)
        if {key: len(ts) for key, ts in codes.items()} != {key: len(ts) for key, ts in scales.items()}:
            return {}  # `check_all_read` names the missing ones behind the last file
        steps = with_known_transposes(self.steps, codes, module, weight)
        to = getattr(module, weight + on_module.SCALES).dtype
        return _params(
            run(steps, {key: [t.contiguous().view(torch.uint8) for t in ts] for key, ts in codes.items()}, kwargs),
            run(steps, {key: [as_scales(t, to) for t in ts] for key, ts in scales.items()}, kwargs),
        )


class FlattenBlocks(loading.ConversionOps):  # type: ignore[misc]
    """gpt-oss's blocks [E, out, in / 32, 16] as codes [E, out, in / 2], and back."""

    def __init__(self, hf_quantizer: object, block: int | None = None) -> None:
        self.hf_quantizer, self.block = hf_quantizer, block

    def convert(self, input_dict: Tensors, *, target_patterns: list[str], **kwargs: Any) -> Tensors:
        codes = first(next(iter(input_dict.values())))
        flat = codes.flatten(2) if self.block is None else codes.view(*codes.shape[:2], -1, self.block)
        return {target_patterns[0]: flat}

    @property
    def reverse_op(self) -> loading.ConversionOps:
        return FlattenBlocks(self.hf_quantizer, 16 if self.block is None else None)


def makes_quantized(converter: object, model: nn.Module) -> bool:
    """True for a converter that makes experts' weights which the model has as codes."""
    if not isinstance(converter, loading.WeightConverter):
        return False
    coded = [path for path, module in model.named_modules() if hasattr(module, on_module.MARK)]
    names = "\n".join(f"{path}.{name}" for path in coded for name in on_module.WEIGHTS)
    return any(re.search(f"{target}$", names, re.MULTILINE) for target in converter._original_target_patterns)


def quantizing(converters: Iterable[Any], model: nn.Module, name: str) -> list[Any]:
    """The converters; those that make experts' weights make codes of a format instead."""
    return [
        converter.copy(*patterns(converter), operations=[Quantize(name, converter.operations)])
        if makes_quantized(converter, model)
        else converter
        for converter in converters
    ]


def unquantized(converter: Any) -> Any:
    """A converter of `quantizing` as it was, any other itself."""
    op, *_ = getattr(converter, "operations", None) or (None,)
    return converter.copy(*patterns(converter), operations=op.steps) if isinstance(op, Quantize) else converter


def keeping_quantized(converter: loading.WeightConverter, quantizer: object) -> loading.WeightConverter:
    """A converter of experts' weights that takes FP8 codes and their scales from the checkpoint instead.

    Raises ConfigError where its steps take blocks apart.
    """
    if not all(isinstance(step, (*STACK, loading.Transpose)) for step in converter.operations):
        raise ConfigError(f"codes in blocks do not go through {converter.operations}, by which this family is read")
    sources, targets = patterns(converter)
    ends = [*(source + SCALE_INV for source in sources)]
    ends += [re.sub("weight$", NO_WEIGHT, source) for source in sources if source.endswith(".weight")]
    return converter.copy([*sources, *ends], targets, operations=[KeepQuantized(quantizer, converter.operations)])


def patterns(converter: loading.WeightConverter) -> tuple[list[str], list[str]]:
    return list(converter._original_source_patterns), list(converter._original_target_patterns)


def with_known_transposes(
    steps: Sequence[loading.ConversionOps], tensors: Tensors, module: nn.Module, weight: str
) -> list[loading.ConversionOps]:
    """The steps; a transpose that would look at the module's shape, which is that of codes, is made certain or left
    out, by the shape that the codes stand for."""
    turn = tuple(first(next(iter(tensors.values()))).shape[-2:]) != on_module.dequantized_shape(module, weight)
    looks = [isinstance(step, loading.Transpose) and step.check_dims for step in steps]
    return [
        loading.Transpose(step.dim0, step.dim1) if look else step
        for step, look in zip(steps, looks, strict=True)
        if turn or not look
    ]


def run(steps: Sequence[loading.ConversionOps], tensors: Tensors, kwargs: dict[str, Any]) -> Tensors:
    """The result of all steps; one tensor of no steps by its new name."""
    for step in steps:
        made = step.convert(tensors, **kwargs)
        if made is not tensors:
            tensors.clear()  # whoever called has no need of a second copy
        tensors = made
    if not steps and len(tensors) == len(kwargs["target_patterns"]) == 1:
        return {kwargs["target_patterns"][0]: first(next(iter(tensors.values())))}
    return tensors


def owner(model: nn.Module, key: str) -> tuple[nn.Module, str]:
    """The module of a parameter, and its name there."""
    path, _, name = key.rpartition(".")
    return model.get_submodule(path), name


def as_scales(scales: Tensor, to: torch.dtype) -> Tensor:
    """Scales in the dtype that the format has: powers of two may come as their exponents."""
    if to is torch.uint8:
        if scales.element_size() != 1:
            raise ConfigError(f"scales in {scales.dtype} are no powers of two in a byte")
        return scales.contiguous().view(to)
    if scales.dtype is torch.uint8:
        return torch.pow(2.0, scales.to(torch.int32) - 127)
    return scales.to(to)


def _page_out(tensor: Tensor) -> None:
    """Give whole pages of a mapped file back at once (Linux): else they count as this process's until memory is short.

    Loading 2.1 GB to NF4 peaks at 1.1 GB so, and at 3.2 GB without it.
    """
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if tensor.device.type == "cpu" and begin < end and sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), PAGE_OUT)


def listed(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, list) else [value]


def first(value: Any) -> Tensor:
    return listed(value)[0]


def _params(codes: Tensors, scales: Tensors) -> Tensors:
    """Frozen parameters, by the names that a module has them."""
    by_name = codes | {key + on_module.SCALES: value for key, value in scales.items()}
    return {key: nn.Parameter(first(value), requires_grad=False) for key, value in by_name.items()}
