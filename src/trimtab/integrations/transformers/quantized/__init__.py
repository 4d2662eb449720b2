"""Codes as parameters of a transformers experts module, in the place of its weights.

A weight becomes a frozen parameter of the same name, codes of [E, out, in] whichever way the module has it, with
`<name>_scales` beside it; the module's `codes_of_experts` has the format. Under expert parallelism both are DTensors as
the weight was.

Legend: E experts of this rank, out and in the outputs and inputs of a weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from trimtab.errors import ConfigError
from trimtab.experts.quantized import FORMATS, check_held, decoded, hold, misfit, quantized, scales_of
from trimtab.experts.quantized import MARK as MARK
from trimtab.parallel.meshes import local_part

WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
SCALES = "_scales"
"""Suffix of a weight's name: the scales of its codes."""
CODES = "_codes"
"""Suffix of a weight's name in files: no other program takes codes for weights."""


def weights_in(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of an experts module by name, or the codes in their place."""
    return ((name, getattr(module, name)) for name in WEIGHTS if isinstance(getattr(module, name, None), Tensor))


def codes_of(module: nn.Module, weight: str, held: Any = None) -> tuple[str, Tensor, torch.dtype] | None:
    """The format of the codes in a weight's place, their scales, and the dtype that they stand for: ours, or those of
    transformers' FP8 experts with float scales. None where there are values. held: codes and scales in their place.

    Raises ConfigError as `check_held` does.
    """
    ours: Any = getattr(module, MARK, None)
    if ours is not None:
        name, dtype = format_of(module, weight, ours[0]), ours[1]
        codes, scales = held or (getattr(module, weight), getattr(module, f"{weight}{SCALES}"))
        check_held(codes, scales, name, dtype, type(module).__name__)
        return name, scales, dtype
    grid: Any = getattr(module, f"{weight}_scale_inv", None)
    blocks, e4m3 = getattr(module, "block_size", None), getattr(module.down_proj, "dtype", None) is torch.float8_e4m3fn
    if e4m3 and isinstance(grid, Tensor) and grid.dtype is torch.float32 and tuple(blocks or ()) == (128, 128):
        return "fp8", grid, getattr(module.config, "dtype", None) or torch.bfloat16
    return None


def check_in_memory(model: nn.Module) -> None:
    """Raise ConfigError where accelerate has offloaded experts: before a forward it puts back what they had then."""
    experts = (module for part in model.modules() if hasattr(part, "_hf_hook") for module in part.modules())
    if any(value.is_meta for module in experts for _, value in weights_in(module)):
        raise ConfigError(f"accelerate has offloaded experts of {type(model).__name__}: load it without")


def format_of(module: nn.Module, weight: str, name: str) -> str:
    """The format of one weight of a module that has its weights in the format `name`."""
    return name if weight != WEIGHTS[0] or module.is_concatenated else FORMATS[name].in_turn or name


def allocate_params(module: nn.Module, name: str) -> None:
    """Put uninitialized codes and scales of a format in the place of the module's weights, for a loader to fill. Raises
    ConfigError as `check_fits` does."""
    for weight, outs, ins in check_fits(module, name):
        value, own = getattr(module, weight), format_of(module, weight, name)
        f, panel = FORMATS[own], FORMATS[own].panel(value.dtype)
        shape = len(value), outs // panel, ins // f.per_byte * panel
        codes = torch.empty(shape, dtype=f.dtype_of(value.dtype), device=value.device)
        scales = torch.empty(scales_of(codes, own), dtype=f.scales, device=value.device)
        hold(module, weight, codes, scales)
        setattr(module, MARK, (name, value.dtype))


def check_fits(module: nn.Module, name: str) -> list[tuple[str, int, int]]:
    """The module's weights with their outputs and inputs. Raises ConfigError where the format's blocks do not fit them,
    or straddle gate and up."""
    f, who, found = FORMATS[name], type(module).__name__, []
    for weight, value in weights_in(module):
        outs, ins = value.shape[:0:-1] if module.is_transposed else value.shape[1:]
        if why := misfit(name, outs, ins, value.dtype, f"{who}.{weight}"):
            raise ConfigError(why)
        if f.outs > 1 and weight == "gate_up_proj" and (outs // 2) % f.outs:
            raise ConfigError(
                f"{name} has blocks of {f.outs} outputs, which straddle gate and up in {who}: {outs // 2} each"
            )
        found.append((weight, outs, ins))
    return found


def quantize_param(module: nn.Module, weight: str, name: str) -> None:
    """Quantize one weight of the module in place."""
    value, own = getattr(module, weight).detach(), format_of(module, weight, name)
    codes, scales = quantize_matrices(local_part(value), own, transposed=bool(module.is_transposed))
    hold(module, weight, _placed_as(value, codes), _placed_as(value, scales))
    setattr(module, MARK, (name, value.dtype))


def dequantize_params(module: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Put the weights that the module's codes stand for in their place, to train. Raises ConfigError as `codes_of`."""
    for weight, wide in [(weight, dequantized(module, weight, dtype)) for weight, _ in weights_in(module)]:
        delattr(module, weight)
        delattr(module, weight + SCALES)
        module.register_parameter(weight, nn.Parameter(wide))
    delattr(module, MARK)


def dequantized(module: nn.Module, weight: str, dtype: torch.dtype | None = None, held: Any = None) -> Tensor:
    """The weight that the module's codes, or codes and scales that are `held` in a state of it, stand for, as the
    module would have it. Raises ConfigError as `codes_of`."""
    coded = codes_of(module, weight, held)
    assert coded is not None
    name, scales, of = coded
    codes = held[0] if held else getattr(module, weight)
    local = local_part(codes.detach()), local_part(scales.detach())
    shape = dequantized_shape(module, weight)[:: -1 if module.is_transposed else 1]
    wide = torch.empty(len(local[0]), *shape, dtype=dtype or of, device=codes.device)
    for into, code, scale in zip(wide, *local, strict=True):
        value = decoded(code[None], scale[None], name, into.dtype)[0]
        into.copy_(value.t() if module.is_transposed else value)
    return _placed_as(codes, wide)


def quantize_matrices(value: Tensor, name: str, *, transposed: bool = False) -> tuple[Tensor, Tensor]:
    """Codes and scales of weights [..., out, in], or [..., in, out] if transposed: one matrix at a time where a format
    computes in float32."""
    if value.dim() == 2 or FORMATS[name].decode:
        return quantized(value.mT if transposed else value, name)
    made = [quantize_matrices(matrix, name, transposed=transposed) for matrix in value]
    return torch.stack([codes for codes, _ in made]), torch.stack([scales for _, scales in made])


def dequantized_shape(module: nn.Module, weight: str) -> tuple[int, int]:
    """(out, in) of the weight that a module's codes stand for."""
    of = FORMATS[format_of(module, weight, getattr(module, MARK)[0])]
    return of.shape_of(getattr(module, weight))[-2:]  # type: ignore[return-value]


def packed_in(model: nn.Module, *, kept: bool) -> list[nn.Module]:
    """The modules whose weights are packed. Raises ConfigError where others have codes that are not kept as such."""
    coded = [module for module in model.modules() if hasattr(module, MARK)]
    packed = [module for module in coded if FORMATS[getattr(module, MARK)[0]].decode]
    if len(packed) < len(coded) and not kept:
        raise ConfigError(
            f"{type(model).__name__} would have codes of experts saved as weights: save the model that was quantized, "
            "not a part of it nor one around it, or call dequantize_experts(model) before"
        )
    return packed


@contextmanager
def as_weights(model: nn.Module, state: dict[str, Any] | None = None) -> Iterator[None]:
    """Have state dicts of the model, and `state`, one of before, hold weights in the place of packed ones."""
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if FORMATS[getattr(module, MARK, ("nf4",))[0]].decode:
                hooks.enter_context(module.register_state_dict_post_hook(_show_weights))
                _show_weights(module, {} if state is None else state, f"{path}.")
        yield


def _show_weights(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    for weight, _codes in weights_in(module):
        if (scales := state.pop(prefix + weight + SCALES, None)) is not None:
            state[prefix + weight] = dequantized(module, weight, held=(state[prefix + weight], scales))


def _placed_as(like: Tensor, local: Tensor) -> Tensor:
    """A DTensor of this rank's experts where `like` is one. Raises ConfigError if it is sharded otherwise."""
    if not isinstance(like, DTensor):
        return local
    if any(isinstance(place, Shard) and place.dim != 0 for place in like.placements):
        raise ConfigError("experts of codes are sharded by expert alone")
    size, mesh = torch.Size((len(like), *local.shape[1:])), like.device_mesh  # FSDP's ranks may hold different numbers
    return DTensor.from_local(local, mesh, like.placements, run_check=False, shape=size, stride=local.stride())


def check_all_read(model: nn.Module) -> None:
    """Raise ConfigError if the checkpoint lacked a parameter that `allocate_params` prepared: transformers only warns
    that it is MISSING, and codes without their scales are other weights."""
    coded = [(path, module) for path, module in model.named_modules() if hasattr(module, MARK)]
    every = [(f"{path}.{name}", p) for path, module in coded for name, p in module.named_parameters(recurse=False)]
    lacking = [name for name, p in every if not (p.is_meta or getattr(p, "_is_hf_initialized", False))]
    if lacking:
        more = f" and {len(lacking) - 4} more" if len(lacking) > 4 else ""
        raise ConfigError(
            f"the checkpoint {getattr(model, 'name_or_path', '')} gave nothing, or no pairs of codes and scales, for "
            f"{', '.join(lacking[:4])}{more}: fetch all of its files again; if its experts are plain weights, take "
            "quantization_config out of its config.json"
        )


def plan_scales(model: nn.Module, plan: dict[str, str]) -> None:
    """In a plan of parameters by `*` for numbers, scales are as their codes."""
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

    names = {replace_layer_number_by_wildcard(name) for name, _ in model.named_parameters()}
    plan.update({key + SCALES: style for key, style in list(plan.items()) if key + SCALES in names})
