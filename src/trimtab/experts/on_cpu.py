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
from trimtab.experts.lora import experts_first
from trimtab.experts.matrix import cast, joined, with_rows
from trimtab.experts.passes import Pass
from trimtab.kernels.api import put
from trimtab.kernels.compiled import ACTIVATIONS, CODES, TYPES, CompiledKernels
from trimtab.kernels.tensor_checks import in_clean_thread

Fields = dict[str, Any]
ADAPTED = 32
"""Where there are adapters, D and F are multiples of it: their columns lie behind the others (cpu/bring.h)."""
NAMES = ("up", "down")


def covers(p: Pass) -> bool:
    """Whether the C++ kernels compute this call."""
    up, down = p.up, p.down
    adapted = up.lora is not None or down.lora is not None
    known = _known(p.word)
    if not isinstance(p.kernels, CompiledKernels) or known is None or p.x.dtype not in TYPES:
        return False
    number = CODES.get(up.format)
    if number != CODES.get(down.format) or up.format not in ("", *CODES) or len(up.biases) != len(down.biases):
        return False
    dtype = up.values[0].dtype
    if number == CODES["packed"]:  # of the rows' type, and parted as C++ reads them
        parted = (up.format == "packed_pairs") == bool(known.get("interleaved"))
        if not parted or not dtype is down.values[0].dtype is p.x.dtype:
            return False
    for weight in (up, down):
        if weight.values[0].ndim < 3:
            return False
        for t in (*weight.values, *weight.biases):
            if not t.is_contiguous() or not (up.format or t.dtype is dtype):
                return False
        lora = weight.lora
        if (weight.scales is not None and not weight.scales.is_contiguous()) or (lora is not None and lora.dropout):
            return False
    if adapted and (p.x.shape[1] % ADAPTED or down.ins % ADAPTED):
        return False
    return not (adapted or up.format) or _passed(p.kernels)


def _passed(kernels: CompiledKernels) -> bool:
    """Whether their adapters and codes give the right numbers, tested before the first use. Says so if not."""

    def find(kernels: CompiledKernels) -> str | None:
        from trimtab.experts.quantized import every_code
        from trimtab.kernels.expert_check import first_lora_fault

        # In a thread of its own: modes of the caller see nothing of it.
        fault = in_clean_thread(torch.device("cpu"), lambda: first_lora_fault(kernels, every_code))
        if fault is not None:
            warnings.warn(f"the compiled kernels: {fault}. Such experts go block by block instead", stacklevel=4)
        return fault

    return kernels.fault_by(find, "adapters and codes") is None


def forward(p: Pass, keep: bool) -> tuple[Tensor, Tensor | None]:
    """y [M, D], and with `keep` the pre-activations [R, I]."""
    kernels, x = _kernels(p), p.x.contiguous()
    fields = _fields(p, x) | _weights(p, x)
    pre = kernels.empty(fields["R"], p.up.outs, dtype=x.dtype) if keep else None
    y = kernels.empty(*x.shape, dtype=x.dtype)
    if p.up.lora or p.down.lora:
        fields |= _thin(p, x.dtype if p.up.format else fields["up"].dtype)
    kernels.forward(fields | {"pre": pre, "y": y})
    return y, pre


def backward(p: Pass, dy: Tensor, pre: Tensor, need_x: bool, d_pre: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """dx [M, D] and dw [M, K]; see `passes.backward`."""
    kernels, x = _kernels(p), p.x.contiguous()
    fields = _fields(p, x) | _weights(p, x)
    if pre.shape[0] < fields["R"] or pre.shape[1:] != (p.up.outs,):
        raise InputError(f"the pre-activations came back as {tuple(pre.shape)}", phase="experts")
    dx = kernels.empty(*x.shape, dtype=x.dtype) if need_x else None
    dw = torch.zeros(p.w.shape, dtype=torch.float32, device="cpu")
    fields |= {"pre": pre.contiguous(), "dy": dy.to(x.dtype).contiguous(), "dx": dx, "dw": dw, "d_pre": d_pre}
    if p.up.lora or p.down.lora:
        fields |= _thin(p, x.dtype if p.up.format else fields["up"].dtype, fields["R"])
    later = _written(p, fields) if d_pre is None else []
    kernels.backward(fields)
    for written in later:
        put(*written)
    return dx, dw.to(p.w.dtype)


def gradients(p: Pass, dy: Tensor, pre: Tensor, d_pre: Tensor) -> None:
    """The tensors' gradients, from what the backward left."""
    x = p.x.contiguous()
    fields = _fields(p, x)
    fields |= {"pre": pre.contiguous(), "dy": dy.to(x.dtype).contiguous(), "d_pre": d_pre}
    if p.up.lora or p.down.lora:
        fields |= _thin(p, rows=fields["R"])
    later = _written(p, fields)
    _kernels(p).weight_gradients(fields)
    for written in later:
        put(*written)


def _kernels(p: Pass) -> CompiledKernels:
    assert isinstance(p.kernels, CompiledKernels)
    return p.kernels


@lru_cache(maxsize=64)
def _known(word: str) -> Fields | None:
    """The activation's fields of cpu/call.h, None where C++ does not know it."""
    name = word.split()[0]
    if name not in ACTIVATIONS:
        return None
    activation = activation_of(word)
    number = {"act": ACTIVATIONS.index(name), "gated": activation.gated}
    if not isinstance(activation, ClampedSwiGLU):
        return number
    numbers = {key: getattr(activation, key) for key in ("alpha", "limit", "shift")}
    return number | numbers | {"interleaved": int(activation.interleaved)}


def _fields(p: Pass, x: Tensor) -> Fields:
    """What all three calls read, and what keeps it alive."""
    plan, (M, D), up, down, known = p.plan, x.shape, p.up, p.down, _known(p.word)
    e, F, width = down.groups, down.ins, up.outs
    assert known is not None
    fits = down.outs == D and up.groups == e and up.ins == D and p.w.shape[0] == M
    fits = fits and width == (2 * F if known["gated"] else F)
    if not fits or plan.offsets_e.shape[0] != e + 1 or plan.bag_offsets.shape[0] != M + 1:
        raise InputError(
            f"x {tuple(x.shape)}, weights {tuple(p.w.shape)}, up {tuple(up.values[0].shape)} and down "
            f"{tuple(down.values[0].shape)} do not fit together",
            phase="experts",
        )
    w = p.w if p.w.dtype is torch.float32 else p.w.to(torch.float32)
    return known | {
        "type": TYPES[x.dtype], "transposed": int(up.transposed), "M": M, "R": plan.row_R.shape[0], "E": e,
        "D": D, "F": F, "row_R": plan.row_R, "slot_R": plan.slot_R, "offsets": plan.offsets_e, "x": x,
        "w": w.contiguous(),
    }  # fmt: skip


def _weights(p: Pass, x: Tensor) -> Fields:
    """Values or codes, and biases, where they are read, in one of the types that may lie beside x."""
    up, down = p.up.values[0], p.down.values[0]
    if p.up.format:
        fields: Fields = {"type_weights": CODES[p.down.format], "up_scales": p.up.scales, "down_scales": p.down.scales}
    else:
        if up.dtype is not x.dtype and (up.dtype, x.dtype) != (torch.float32, torch.bfloat16):  # beside those it rounds
            runs = with_rows(p.plan.offsets_e)
            up, down = (cast(joined(t), x.dtype, p.kernels, runs) for t in (up, down))
        fields = {"type_weights": TYPES[up.dtype]}
    fields |= {"up": up, "down": down}
    if p.up.biases:
        fields |= {"up_bias": p.up.biases[0].to(x.dtype), "down_bias": p.down.biases[0].to(x.dtype)}
    return fields


def _thin(p: Pass, dtype: torch.dtype | None = None, rows: int | None = None) -> Fields:
    """Of adapters. dtype: of the weights that their factors lie beside, contiguous, where these are read. rows: of `v`,
    where gradients are written: C++ writes both of an adapter, also where one is wanted alone."""
    fields: Fields = {}
    for name, weight, u, v, sink in zip(NAMES, (p.up, p.down), p.u, p.v, p.sinks, strict=True):
        lora = weight.lora
        if lora is None:
            continue
        fields |= {f"rank_{name}": lora.rank, f"scale_{name}": lora.scale, f"u_{name}": u}
        factors = (("a", lora.a), ("b", lora.b))
        for kind, factor in factors if dtype is not None else ():
            legal = factor.dtype is dtype and factor.is_contiguous()
            made = factor if legal else experts_first(factor, _kernels(p).empty(*factor.shape, dtype=dtype))  # type: ignore[arg-type]
            fields[f"{name}_{kind}"] = made
        if rows is None:
            continue
        fields[f"v_{name}"] = p.x.new_empty(rows, lora.rank) if v is None else v
        into = (None, None) if sink is None else sink.into[-2:]
        for (kind, factor), target in zip(factors, into if any(t is not None for t in into) else (), strict=False):
            made = _kernels(p).empty(*factor.shape, dtype=torch.float32) if target is None else target
            fields[f"d_{name}_{kind}"] = made
    return fields


def _written(p: Pass, fields: Fields) -> list[tuple[Tensor, Tensor, bool]]:
    """Say where the gradients that are wanted go. What C++ cannot write is made beside it: (target, value, adds)."""
    later: list[tuple[Tensor, Tensor, bool]] = []
    for name, sink, weight in zip(NAMES, p.sinks, (p.up, p.down), strict=True):
        if sink is None:
            continue
        target, adds = sink.into[0], sink.adds[0]
        if target is not None:
            if target.dtype not in TYPES or not target.is_contiguous():
                value = torch.empty(target.shape, dtype=torch.float32, device="cpu")
                later.append((target, value, adds))
                target, adds = value, False
            fields |= {f"d_{name}": target, f"type_{name}": TYPES[target.dtype], f"add_{name}": int(adds)}
        if weight.biases and (target := sink.into[1]) is not None:
            value = fields[f"d_{name}_bias"] = torch.empty(target.shape, dtype=torch.float32, device="cpu")
            later.append((target, value, sink.adds[1]))
    return later
