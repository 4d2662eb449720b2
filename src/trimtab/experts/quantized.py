"""Weights of experts as codes and scales, each a plain tensor: `FORMATS` says how they lie, `decoded` what they mean.

Codes are uint8 [..., out, in / values in a byte]; scales have an entry for each block of outs and ins. Every weight is
(value of its code) * (scale of its block) in float32, then rounded to the dtype that is asked for: bit for bit what
bitsandbytes (nf4, int8) and transformers (fp8, mxfp4) make of the same codes.

`packed` weights are codes without loss, scales of 1: the same values in the order in which products read them. They are
[..., out / p, in * p], p = 32 in float32, 16 in bfloat16, 64 and 32 for gate and up in turn: no loader takes them.

Legend: e experts, out and in the outputs and inputs of a weight.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.kernels.tensor_checks import modes

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution (Dettmers et al. 2023, arXiv 2305.14314)."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
HUGE, _COLLAPSE = 2**21, 25  # bytes of a huge page; Linux's MADV_COLLAPSE
_127TH = 7.874015718698502e-3
MARK = "codes_of_experts"
"""Attribute of a module of transformers whose weights are codes: (format, dtype of the weights)."""


@dataclass(frozen=True)
class Format:
    """per_byte: values in a byte. outs, ins: of a block that shares a scale; 0: all inputs of an output. values: of
    codes of four bits; high_first: whether a byte's upper half comes first. stored: the dtype whose bits other codes
    are, times `factor`. scales: the scales' dtype; uint8 holds a power of two, biased by 127. unit: a scale with which
    codes stand for numbers around 1.

    decode: of codes that are the values in another order, a view of them that has, flat, the order of the weights.
    runs: parts whose outputs lie in turn in the weights. in_turn: the format for gate and up in turn, if another."""

    per_byte: int
    outs: int
    ins: int
    unit: float
    scales: torch.dtype = torch.float32
    stored: torch.dtype = torch.uint8
    factor: float = 1.0
    values: tuple[float, ...] = ()
    high_first: bool = False
    quantize: Callable[[Tensor, Format], tuple[Tensor, Tensor]] | None = None
    decode: Callable[[Tensor, Format], Tensor] | None = None
    runs: int = 1
    in_turn: str = ""

    def panel(self, dtype: torch.dtype) -> int:
        """Outputs in a row of codes in that dtype."""
        return self.outs * self.runs * dtype.itemsize // 4 if self.decode else 1

    def shape_of(self, codes: Tensor) -> tuple[int, ...]:
        """The shape [..., out, in] of the weights that codes stand for."""
        (*lead, outs, ins), panel = codes.shape, self.panel(codes.dtype)
        return (*lead, outs * panel, ins // panel * self.per_byte)

    def dtype_of(self, weights: torch.dtype) -> torch.dtype:
        """The codes' dtype for weights in that one."""
        return weights if self.decode else torch.uint8


def scales_of(codes: Tensor, name: str) -> tuple[int, ...]:
    """The shape of the scales of codes."""
    f = FORMATS[name]
    *lead, outs, ins = f.shape_of(codes)
    return (*lead, -(-outs // f.outs), -(-ins // f.ins) if f.ins else 1)


def decoded(
    codes_eOI: Tensor, scales_eOI: Tensor, name: str | Format, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """The weights [e, out, in] of codes, into `out` if it is given."""
    f = name if isinstance(name, Format) else FORMATS[name]
    if f.decode:
        value = f.decode(codes_eOI, f)
        out = codes_eOI.new_empty(f.shape_of(codes_eOI), dtype=dtype) if out is None else out
        out.view(value.shape).copy_(value)
        return out
    if f.values:
        wide = (_pairs.__wrapped__ if modes() else _pairs)(f.values, f.high_first, codes_eOI.device)
        value = wide.index_select(0, codes_eOI.reshape(-1).int()).view(*codes_eOI.shape[:-1], -1)
    else:
        value = codes_eOI.view(f.stored).to(torch.float32)
    powers = scales_eOI.dtype is torch.uint8
    scale = torch.pow(2.0, scales_eOI.to(torch.int32) - 127) if powers else scales_eOI
    e, outs, ins = value.shape
    if f.outs > 1:
        scale = scale.repeat_interleave(f.outs, 1)[:, :outs]
    if f.ins and ins % f.ins:
        value.mul_(scale.repeat_interleave(f.ins, 2)[:, :, :ins])
    else:
        blocks = scale.shape[2]
        value.view(e, outs, blocks, ins // blocks).mul_(scale.unsqueeze(-1))
    if f.factor != 1.0:
        value.mul_(f.factor)
    return value.to(dtype) if out is None else out.copy_(value)


def quantized(weight: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of weights [..., out, in] in a format that there is an encoder for.

    Raises:
        ConfigError: there is none, or its blocks do not divide the weights, or it does not hold their dtype.
    """
    f = FORMATS.get(name)
    if f is None or f.quantize is None or (f.runs > 1 and weight.dim() > 3):  # parts that lie apart take no turns
        raise ConfigError(f"weights can be quantized to {encoded()}, not to {name!r}", phase="experts")
    if why := misfit(name, weight.shape[-2], weight.shape[-1], weight.dtype):
        raise ConfigError(why, phase="experts")
    return f.quantize(weight.detach() if f.decode else weight.detach().contiguous(), f)


def in_huge_pages(tensor: Tensor) -> None:
    """Have Linux move a tensor's memory to pages of 2 MB, whose addresses a processor finds sooner: one token reads its
    experts a tenth faster, 64 tokens 3 %. Where the kernel has no room or is older than 6.1, all stays as it is."""
    if sys.platform == "linux" and tensor.untyped_storage().device.type == "cpu":  # not where values are faked
        begin = -(-tensor.data_ptr() // HUGE) * HUGE
        count = (tensor.data_ptr() + tensor.nbytes - begin) // HUGE
        if count > 0:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(count * HUGE), _COLLAPSE)


def encoded() -> list[str]:
    """The formats that weights can be quantized to, by the names that users have for them."""
    return [name for name, f in FORMATS.items() if f.quantize and f.runs == 1]


def misfit(name: str, outs: int, ins: int, dtype: torch.dtype, of: str = "a weight") -> str:
    """A sentence where a format does not hold weights [..., outs, ins] in a dtype, else "". of: what it calls them."""
    f = FORMATS[name]
    if f.decode and dtype not in (torch.float32, torch.bfloat16):
        return f"{name} holds weights in float32 or bfloat16, and {of} is in {dtype}"
    block = f.outs if f.decode else 0 if f.outs > 1 else f.ins  # of codes, blocks of outputs are cut at the end
    for what, size, of_block in (("outputs", outs, f.panel(torch.float32)), ("inputs", ins, block or f.per_byte)):
        if size % of_block:
            more = "; int8 takes any number" if f.quantize and not f.decode else ""
            return f"{name} has blocks of {of_block} {what}, and {of} has {size}, no multiple{more}"
    return ""


def check_held(codes: Tensor, scales: Tensor, name: str, dtype: torch.dtype, of: str) -> None:
    """Raise ConfigError where something has cast codes for weights in `dtype` or their scales, as `model.to(dtype)` and
    FSDP's mixed precision do, or is to train them. of: the module that has them."""
    f = FORMATS[name]
    for what, tensor, own in (("codes", codes, f.dtype_of(dtype)), ("scales", scales, f.scales)):
        if tensor.dtype is not own:
            raise ConfigError(
                f"{of}'s {what} of {name} came in {tensor.dtype}, and cast they give other weights: load the model in "
                "the dtype that it is to compute in, in the place of model.to(dtype) and of FSDP's mixed precision",
                phase="experts",
            )
    if codes.requires_grad or scales.requires_grad:
        raise ConfigError(f"{of}'s codes of {name} do not train: take requires_grad from them", phase="experts")


def hold(module: nn.Module, weight: str, codes: Tensor, scales: Tensor) -> None:
    """Put codes and their scales in the place of a module's weight, frozen, which no plain weights are loaded into."""
    for key, value in ((weight, codes), (f"{weight}_scales", scales)):
        setattr(module, key, nn.Parameter(value, requires_grad=False))
    module.register_load_state_dict_pre_hook(refuse_others)  # type: ignore[no-untyped-call]


def refuse_others(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """A hook before a load, loose or not: raise ConfigError for weights in the place of codes, and the other way."""
    params = dict(module.named_parameters(prefix.removesuffix(".")))
    for name, own in params.items():
        of = name.removesuffix("_scales")
        if of != name and of in state and name not in state:
            raise ConfigError(f"{of} came without {name}: load plain weights first, and quantize them then")
        codes = getattr(state.get(name), "dtype", None) is torch.uint8 or f"{name}_scale_inv" in state.keys() - params
        if codes and own.is_floating_point():
            raise ConfigError(f"{name} came as codes, not in {own.dtype}: quantize the model likewise, then load")


def every_code(name: str, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of every byte that stands for numbers, scales with which they are around 1, and the weights [e, out, in] in
    float32: for tests of what reads codes. dtype: of packed ones."""
    f, (e, outs, ins) = FORMATS[name], shape
    place = torch.arange(e * outs * ins // f.per_byte)
    if f.decode:
        weight = ((place * 37 % 255 - 127) / 512).to(dtype).view(shape)
        return (*quantized(weight, name), weight.float())
    codes = (place * 37 % (127 if name == "fp8" else 256)).to(torch.uint8)  # e4m3 has NaN at 127
    if name == "fp8":
        codes |= (place % 3 == 0).to(torch.uint8) << 7
    codes = codes.view(e, outs, -1)
    scales = torch.full(scales_of(codes, name), f.unit, dtype=f.scales)
    return codes, scales, decoded(codes, scales, name, torch.float32)


def _nf4(weight: Tensor, f: Format) -> tuple[Tensor, Tensor]:
    blocks = weight.reshape(-1, f.ins).float()
    absmax = blocks.abs().amax(1)
    blocks = blocks * (1.0 / absmax.clamp(min=1e-38)).unsqueeze(1)
    values = torch.tensor(f.values, device=weight.device)
    code = torch.bucketize(blocks, (values[1:] + values[:-1]) / 2, out_int32=True).to(torch.uint8)
    codes = (code[:, ::2] << 4) | code[:, 1::2]
    lead = weight.shape[:-1]
    return codes.view(*lead, -1), absmax.view(*lead, -1)


def _int8(weight: Tensor, f: Format) -> tuple[Tensor, Tensor]:
    wide = weight.float()
    absmax = wide.abs().amax(-1, keepdim=True)
    codes = (wide * (127.0 / absmax.clamp(min=1e-38))).round().to(torch.int8)
    return codes.view(torch.uint8), absmax


def _packed(weight: Tensor, f: Format) -> tuple[Tensor, Tensor]:
    """Panels of 32 outputs of a run side by side, of each input, or in two bytes of two inputs beside each other: a
    product that sums over inputs in their order reads a panel from one end to the other, on every processor."""
    (*lead, outs, ins), word = weight.shape, 4 // weight.element_size()
    panels, panel = outs // f.outs // f.runs, f.panel(weight.dtype)
    words = weight.view(*lead, panels, f.outs, f.runs, ins // word, word)
    codes = words.movedim((-3, -2), (-5, -3)).contiguous().view(*lead, outs // panel, panel * ins)
    return codes, weight.new_ones(*lead, outs // f.outs, 1, dtype=f.scales)


def _unpacked(codes: Tensor, f: Format) -> Tensor:
    (*lead, outs, ins), word = f.shape_of(codes), 4 // codes.element_size()
    words = codes.view(*lead, f.runs, outs // f.outs // f.runs, ins // word, f.outs, word)
    return words.movedim((-5, -3), (-3, -2))


@lru_cache(maxsize=8)
def _pairs(values: tuple[float, ...], high_first: bool, device: torch.device) -> Tensor:
    """The two values of each byte, [256, 2]. Under a mode not from the cache: a plan's have none."""
    with torch.inference_mode(False), torch.device(device):
        value, byte = torch.tensor(values, dtype=torch.float32), torch.arange(256)
    halves = (byte >> 4, byte & 15) if high_first else (byte & 15, byte >> 4)
    return torch.stack([value[half] for half in halves], 1)


FORMATS = {
    "nf4": Format(2, 1, 64, 0.25, values=NF4, high_first=True, quantize=_nf4),
    "int8": Format(1, 1, 0, 0.25, stored=torch.int8, factor=_127TH, quantize=_int8),
    "fp8": Format(1, 128, 128, 2.0**-10, stored=torch.float8_e4m3fn),
    "mxfp4": Format(2, 1, 32, 124, scales=torch.uint8, values=E2M1),
    "packed": Format(1, 32, 0, 1.0, quantize=_packed, decode=_unpacked, in_turn="packed_pairs"),
    "packed_pairs": Format(1, 32, 0, 1.0, quantize=_packed, decode=_unpacked, runs=2),
}
"""By name: NF4 with an absmax of each 64 values, as bitsandbytes packs them; int8 with an absmax of each row, as
bitsandbytes' `int8_vectorwise_quant`; float8_e4m3 with a scale of each 128 x 128, as DeepSeek's checkpoints have them;
e2m1 with a power of two of each 32 values, as gpt-oss has them: weights there are codes of [e, out, in], too; and
panels of the weights as they are."""
