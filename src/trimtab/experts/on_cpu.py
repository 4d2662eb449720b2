"""The expert MLP by the C++ kernels: one call forward, one backward, one more where weight gradients come later.

They cover activations that C++ knows by name, of contiguous weights in float32 or bfloat16 in either layout,
and codes.

Legend: M rows, K slots per row, R expert rows, e experts, D model dim, I width of the pre-activations, F hidden dim.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import InputError
from trimtab.experts.activations import ClampedSwiGLU, activation_of
from trimtab.experts.adapters import experts_first
from trimtab.experts.expert_call import cast_weights
from trimtab.experts.operands import Operands, Targets
from trimtab.experts.quantized import packed
from trimtab.kernels.api import put
from trimtab.kernels.compiled import ACTIVATIONS, CODES, TYPES, CompiledKernels
from trimtab.kernels.tensor_checks import apart

Fields = dict[str, Any]
ADAPTED = 32
"""Where there are adapters, D and F are multiples of it: their columns lie behind the others (cpu/bring.h)."""
NAMES = ("up", "down", "up_bias", "down_bias")


def covers(o: Operands) -> bool:
    """Whether the C++ kernels compute this call."""
    params = o.up, o.down, o.up_bias, o.down_bias
    adapted = any(pair.rank for pair in o.thin or ())
    return (
        isinstance(o.kernels, CompiledKernels)
        and _known(o.word) is not None
        and o.x.dtype in TYPES
        and all(p is None or (p.is_contiguous() and (o.codes is not None or p.dtype is o.up.dtype)) for p in params)
        and (o.codes is None or (o.codes.up.is_contiguous() and o.codes.down.is_contiguous()))
        and (not adapted or (o.x.shape[1] % ADAPTED == 0 and o.hidden % ADAPTED == 0))
        and (not (adapted or o.codes) or _passed(o.kernels))
    )


def _passed(kernels: CompiledKernels) -> bool:
    """Whether their adapters and codes give the right numbers, tested before the first use. Says so if not."""

    def find(kernels: CompiledKernels) -> str | None:
        from trimtab.experts.adapted_check import first_adapted_fault

        # In a thread of its own: modes of the caller see nothing of it.
        fault = apart(torch.device("cpu"), lambda: first_adapted_fault(kernels))
        if fault is not None:
            warnings.warn(f"the compiled kernels: {fault}. Such experts go block by block instead", stacklevel=4)
        return fault

    return kernels.fault_by(find, "adapters and codes") is None


def forward(o: Operands, keep: bool) -> tuple[Tensor, Tensor]:
    """y [M, D], and the pre-activations [R, I], none unless `keep`."""
    kernels, x = _kernels(o), o.x.contiguous()
    fields = _fields(o, x) | _weights(o, x)
    pre = kernels.empty(fields["R"] if keep else 0, o.width, dtype=x.dtype)
    y = kernels.empty(*x.shape, dtype=x.dtype)
    thin = _adapters(o, x.dtype if o.codes else fields["up"].dtype)
    kernels.forward(fields | thin | {"pre": pre if keep else None, "y": y})
    return y, pre


def backward(
    o: Operands, dy: Tensor, pre: Tensor, targets: Targets, need_x: bool, d_pre: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """dx [M, D] and dw [M, K]; see `by_blocks.backward`."""
    kernels, x = _kernels(o), o.x.contiguous()
    fields = _fields(o, x) | _weights(o, x)
    if pre.shape[0] < fields["R"] or pre.shape[1:] != (o.width,):
        raise InputError(f"the pre-activations came back as {tuple(pre.shape)}", phase="experts")
    dx = kernels.empty(*x.shape, dtype=x.dtype) if need_x else None
    dw = torch.zeros(o.w.shape, dtype=torch.float32, device="cpu")
    fields |= {"pre": pre.contiguous(), "dy": dy.to(x.dtype).contiguous(), "dx": dx, "dw": dw, "d_pre": d_pre}
    thin = _adapters(o, x.dtype if o.codes else fields["up"].dtype)
    for name, pair in zip(("up", "down"), o.thin or (), strict=False):
        thin[f"v_{name}"] = kernels.empty(fields["R"], pair.rank, dtype=x.dtype)
        thin |= {f"d_{name}_a": pair.d_a, f"d_{name}_b": pair.d_b}
    fields |= thin
    later = _written(fields, targets) if d_pre is None else []
    kernels.backward(fields)
    _put(later)
    return dx, dw.to(o.w.dtype)


def weight_gradients(o: Operands, dy: Tensor, pre: Tensor, d_pre: Tensor, targets: Targets) -> None:
    """The parameters' gradients, from what the backward left."""
    x = o.x.contiguous()
    fields = _fields(o, x)
    fields |= {"pre": pre.contiguous(), "dy": dy.to(x.dtype).contiguous(), "d_pre": d_pre}
    later = _written(fields, targets)
    _kernels(o).weight_gradients(fields)
    _put(later)


def _kernels(o: Operands) -> CompiledKernels:
    assert isinstance(o.kernels, CompiledKernels)
    return o.kernels


@lru_cache(maxsize=64)
def _known(word: str) -> Fields | None:
    """The activation's fields of cpu/call.h, None where C++ does not know it."""
    name = word.split()[0]
    if name not in ACTIVATIONS:
        return None
    activation, number = activation_of(word), {"act": ACTIVATIONS.index(name)}
    if not isinstance(activation, ClampedSwiGLU):
        return number
    numbers = {key: getattr(activation, key) for key in ("alpha", "limit", "shift")}
    return number | numbers | {"interleaved": int(activation.interleaved)}


def _fields(o: Operands, x: Tensor) -> Fields:
    """What all three calls read, and what keeps it alive."""
    plan, (M, D), (e, _, F), width, known = o.plan, x.shape, o.down.shape, o.width, _known(o.word)
    each = packed(o.codes.format) if o.codes else 1
    wanted, F = (e, D, F), F * each
    if o.transposed:
        F = o.down.shape[1]
        wanted = (e, F, D)
    assert known is not None
    fits = o.down.shape == wanted and o.up.shape[0] == e and o.up.shape[1 if o.transposed else -1] * each == D
    fits = fits and width == (2 * F if activation_of(o.word).gated else F) and o.w.shape[0] == M
    if not fits or plan.offsets_e.shape[0] != e + 1 or plan.bag_offsets.shape[0] != M + 1:
        raise InputError(
            f"x {tuple(x.shape)}, weights {tuple(o.w.shape)}, up {tuple(o.up.shape)} and down {tuple(o.down.shape)} "
            "do not fit together",
            phase="experts",
        )
    w = o.w if o.w.dtype is torch.float32 else o.w.to(torch.float32)
    return known | {
        "type": TYPES[x.dtype], "transposed": int(o.transposed), "M": M, "R": plan.row_R.shape[0], "E": e,
        "D": D, "F": F, "row_R": plan.row_R, "slot_R": plan.slot_R, "offsets": plan.offsets_e, "x": x,
        "w": w.contiguous(),
    }  # fmt: skip


def _weights(o: Operands, x: Tensor) -> Fields:
    """The parameters where they are read, in one of the types that may lie beside x."""
    up, down, up_bias, down_bias = o.up, o.down, o.up_bias, o.down_bias
    if o.codes is not None:
        fields: Fields = {"type_weights": CODES[o.codes.format], "up_scales": o.codes.up, "down_scales": o.codes.down}
    else:
        if up.dtype is not x.dtype and (up.dtype, x.dtype) != (
            torch.float32,
            torch.bfloat16,
        ):  # beside those C++ rounds
            up, down, up_bias, down_bias = cast_weights(up, down, up_bias, down_bias, o.plan, x, o.kernels)
        fields = {"type_weights": TYPES[up.dtype]}
    fields |= {"up": up, "down": down}
    if up_bias is not None and down_bias is not None:
        fields |= {"up_bias": up_bias.to(x.dtype), "down_bias": down_bias.to(x.dtype)}
    return fields


def _adapters(o: Operands, dtype: torch.dtype) -> Fields:
    """The pairs beside weights of this dtype, contiguous."""

    def read(thin: Tensor) -> Tensor:
        if thin.dtype is dtype and thin.is_contiguous():
            return thin
        return experts_first(thin, _kernels(o).empty(*thin.shape, dtype=dtype))

    fields: Fields = {}
    for name, pair in zip(("up", "down"), o.thin or (), strict=False):
        if pair.rank:
            fields |= {f"{name}_a": read(pair.a), f"{name}_b": read(pair.b)}
        fields |= {f"rank_{name}": pair.rank, f"scale_{name}": pair.scale, f"u_{name}": pair.u}
    return fields


def _written(fields: Fields, targets: Targets) -> list[tuple[Tensor, Tensor, bool]]:
    """Say where the gradients that are wanted go. What C++ cannot write is made beside it: (target, value, adds)."""
    later: list[tuple[Tensor, Tensor, bool]] = []
    for name, target, adds in zip(NAMES, targets.each, targets.adds, strict=True):
        if target is None:
            continue
        bias = name.endswith("bias")
        if bias or target.dtype not in TYPES or not target.is_contiguous():
            value = torch.empty(target.shape, dtype=torch.float32, device="cpu")
            later.append((target, value, adds))
            target, adds = value, False
        fields[f"d_{name}"] = target
        if not bias:
            fields |= {f"type_{name}": TYPES[target.dtype], f"add_{name}": int(adds)}
    return later


def _put(later: list[tuple[Tensor, Tensor, bool]]) -> None:
    for target, value, adds in later:
        put(target, value, adds)
