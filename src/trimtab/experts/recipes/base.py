"""What a low-precision recipe is: a frozen value that describes formats and scales, and a state that a module owns.

    recipe = MXFP8(backend="emulated")
    recipe.check(device, in_features, out_features)      refused here, at construction, or never
    state = recipe.state()                               an nn.Module: its buffers are saved with the layer
    call = state.call()                                  one forward and its backward

    y  = call.activation(x, offsets, along="row")    @ call.weight(w, along="in")           forward
    dx = call.gradient(dy, offsets, along="row")     @ call.weight(w, along="out")^T        dgrad
    dw = call.activation(x, offsets, along="column")^T @ call.gradient(dy, offsets, along="column")   wgrad

`along` names the axis that the product contracts: scaling blocks lie along it. Each method quantizes and dequantizes:
its values, in float32, are those that the hardware would multiply.

Legend: R expert rows, e experts, A in features, B out features, C either width. offsets_e: [e + 1].
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from trimtab.errors import BackendError, ConfigError, InputError
from trimtab.experts.recipes.blocks import Blocks
from trimtab.experts.recipes.numbers import E4M3, ElementFormat, Scale, encode
from trimtab.layout import align_up
from trimtab.validation import check_flags

Role = Literal["activation", "gradient", "weight"]
Along = Literal["row", "column", "in", "out"]
Way = Literal["emulated", "hardware"]
Backend = Literal["emulated", "hardware", "auto"]
Packed = tuple[Tensor, Tensor]
"""Bytes of E4M3, and scales in the kernel's layout."""


@dataclass(frozen=True)
class Quantized:
    """values: float32 on the format's grid. scale: as stored, one per block. factor: it, broadcastable to values.

    `values.to(format.dtype)` is exact: those are the bytes that the hardware reads.
    """

    values: Tensor
    scale: Tensor
    factor: Tensor

    def dequantized(self) -> Tensor:
        """values * factor, rounded once to float32."""
        return self.values * self.factor


class Operands:
    """What the products of one call multiply.

    Nothing is read on the host, and all of it works on the meta device. Segment i of the rows is offsets_e[i] ..
    offsets_e[i + 1] - 1, offsets being multiples of the recipe's `alignment`. Scales never cross a segment. Rows from
    offsets_e[-1] on come out zero and influence no scale, whatever they hold.
    """

    recipe: Recipe

    def scale(self, blocks: Blocks, form: ElementFormat, role: Role) -> Scale:
        """Of each block."""
        return self.recipe.scale(blocks.amax(), form)

    def dither(self, x: Tensor, role: Role) -> Tensor | None:
        """For stochastic rounding: uniform numbers of x's shape; None to round to the nearest."""
        return None

    @torch.no_grad()
    def quantize(self, x: Tensor, offsets_e: Tensor | None, role: Role, along: Along) -> Quantized:
        """Rows [R, C] of any floating dtype, or where role is "weight", and offsets_e None, weights [e, A, B].

        Raises:
            InputError: the shape, or `along`, is not one for this role.
        """
        allowed, dims = (("in", "out"), 3) if role == "weight" else (("row", "column"), 2)
        if along not in allowed or x.dim() != dims:
            raise InputError(f"{role} of shape {tuple(x.shape)}, along={along!r}: need {dims} axes, one of {allowed}")
        form = self.recipe.form(role)
        blocks = Blocks(x, *self.recipe.block(role, along), offsets_e)
        scale = self.scale(blocks, form, role)
        values = encode(blocks.x, blocks.spread(scale.encode), form, self.dither(blocks.x, role))
        stored = scale.decode if scale.stored is None else scale.stored
        return Quantized(values, stored, blocks.spread(scale.decode))

    def activation(self, x_RA: Tensor, offsets_e: Tensor, along: Along) -> Tensor:
        """[R, A]. "row": the product contracts A (forward). "column": it contracts each segment's rows (wgrad)."""
        return self.quantize(x_RA, offsets_e, "activation", along).dequantized()

    def gradient(self, dy_RB: Tensor, offsets_e: Tensor, along: Along) -> Tensor:
        """[R, B]. "row": the product contracts B (dgrad). "column": it contracts each segment's rows (wgrad)."""
        return self.quantize(dy_RB, offsets_e, "gradient", along).dequantized()

    def weight(self, w_eAB: Tensor, along: Along) -> Tensor:
        """[e, A, B], held as [expert, in, out]. "in": the product contracts A (forward). "out": B (dgrad)."""
        return self.quantize(w_eAB, None, "weight", along).dequantized()


class RecipeState(Operands, nn.Module):
    """The part of a recipe that changes, one per weight; buffers only, so that state dicts carry it.

    Used directly, each of its methods is a call of its own. One of one's own may define `activation`, `weight` and
    `gradient` alone.
    """

    def __init__(self, recipe: Recipe | None = None) -> None:
        super().__init__()
        if recipe is not None:
            self.recipe = recipe

    def reserve(self, num_groups: int) -> None:
        """Give buffers that have one entry per expert their full shape before a first call."""

    def call(self) -> Operands:
        """For one forward and its backward. Made inside a backward, it is for a forward that is computed again."""
        return self


class Engine:
    """One recipe's layout of scales, and its two multiplications. Reads nothing on the host."""

    alignment: int

    def installed(self) -> bool:
        """Whether what it needs beyond torch is there."""
        return True

    def by_rows(self, x: Packed, w: Packed, offsets_e: Tensor) -> Tensor:
        """Rows [S, C] times weights [e, N, C]: [S, N], not set in the padding."""
        raise NotImplementedError

    def by_groups(self, x: Packed, w: Packed, offsets_e: Tensor) -> Tensor:
        """Columns [A, S] times columns [B, S], segment by segment: [e, A, B], not set for a segment without rows."""
        raise NotImplementedError

    def row_scales(self, q: Quantized) -> Tensor:
        """Of rows that are contracted along C."""
        return q.scale.contiguous()

    def weight_scales(self, q: Quantized, turned: bool) -> Tensor:
        """Of a weight [e, C, N]; where `turned` of [e, N, C]."""
        return (q.scale if turned else q.scale.mT).contiguous()

    def column_scales(self, q: Quantized, offsets_e: Tensor) -> Tensor:
        """Of rows [S, C] that are contracted along S."""
        return q.scale.contiguous()

    def product(
        self, call: Operands, rows_RC: Tensor, w_eAB: Tensor, offsets_e: Tensor, role: Role, along: Literal["in", "out"]
    ) -> Tensor:
        """Rows times w, contracted along "in", or times w^T, contracted along "out": [R, N], zero in the padding."""
        q = call.quantize(self._filled(rows_RC), offsets_e, role, "row")
        w, turned = call.quantize(w_eAB, None, "weight", along), along == "out"
        right = _stored(w.values if turned else w.values.mT), self.weight_scales(w, turned)
        y = self.by_rows((_stored(q.values), self.row_scales(q)), right, offsets_e)
        index_R = torch.arange(y.shape[0], device=y.device)
        return y.masked_fill_((index_R >= offsets_e[-1])[:, None], 0)[: rows_RC.shape[0]]

    def columns(self, call: Operands, rows_RC: Tensor, offsets_e: Tensor, role: Role) -> Packed:
        """An operand of `wgrad`, one byte per value: quantized now, multiplied whenever it is wanted."""
        q = call.quantize(self._filled(rows_RC), offsets_e, role, "column")
        return _stored(q.values.t()), self.column_scales(q, offsets_e)

    def wgrad(self, x: Packed, dy: Packed, offsets_e: Tensor) -> Tensor:
        """[e, A, B], zero for a segment without rows."""
        dw = self.by_groups(x, dy, offsets_e)
        empty_e = offsets_e[1:] == offsets_e[:-1]
        return dw.masked_fill_(empty_e[:, None, None], 0)

    def _filled(self, rows_RC: Tensor) -> Tensor:
        whole = max(align_up(rows_RC.shape[0], self.alignment), self.alignment)  # no kernel is called with no rows
        return pad(rows_RC, (0, 0, 0, whole - rows_RC.shape[0]))


def _stored(values: Tensor) -> Tensor:
    return values.to(E4M3.dtype).contiguous()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A low-precision recipe: frozen, hashable, compared by value.

    Each has a name, an `alignment` that rows per expert segment must be multiples of, and says which hardware
    multiplies its operands: a kernel, on which CUDA compute capabilities, with widths that are multiples of what.

    backend: "emulated" computes the same values with ordinary arithmetic, on any device, slowly; "hardware" is
        refused by `check` where it cannot run; "auto" is hardware where it can run and emulation elsewhere.
    """

    name: ClassVar[str]
    alignment: ClassVar[int]
    kernel: ClassVar[str]
    capabilities: ClassVar[tuple[tuple[int, int], ...]]
    multiple: ClassVar[int]

    backend: Backend

    def __post_init__(self) -> None:
        if self.backend not in get_args(Backend):
            raise ConfigError(f"backend {self.backend!r} of a recipe: choose one of {get_args(Backend)}")
        check_flags(**{f.name: getattr(self, f.name) for f in fields(self) if f.type in (bool, "bool")})

    def form(self, role: Role) -> ElementFormat:
        """What elements are rounded to."""
        return E4M3

    def block(self, role: Role, along: Along) -> tuple[int, int]:
        """(rows, columns) that share a scale; 0 for all of a segment or matrix."""
        raise NotImplementedError

    def scale(self, amax: Tensor, form: ElementFormat) -> Scale:
        """Of blocks with these largest magnitudes, float32."""
        raise NotImplementedError

    def state(self) -> RecipeState:
        """A fresh state, for one weight."""
        return RecipeState(self)

    def engine(self) -> Engine | None:
        """The hardware's products; None where trimtab calls none."""
        return None

    def check(self, device: torch.device, in_features: int, out_features: int) -> Way:
        """How products of these widths are computed on `device`. Emulation takes every device and every width.

        A layer on the meta device will be materialized: the current CUDA device answers for it.

        Raises:
            BackendError: the recipe cannot run there; says what it needs and what this machine has.
        """
        if self.backend == "emulated":
            return "emulated"
        found = None
        if device.type in ("cuda", "meta") and torch.cuda.is_available():
            found = torch.cuda.get_device_capability(device if device.type == "cuda" else None)
        fits = in_features % self.multiple == out_features % self.multiple == 0
        engine = self.engine()
        if engine is not None and engine.installed() and found in self.capabilities and fits:
            return "hardware"
        if self.backend == "auto":
            return "emulated"
        wanted = " or ".join(f"{major}.{minor}" for major, minor in self.capabilities)
        has = "no CUDA device" if found is None else "compute capability {}.{}".format(*found)
        kernel = self.kernel if engine is not None else f"{self.kernel}, which trimtab does not call"
        raise BackendError(
            f"recipe {self.name!r} with backend='hardware' needs {kernel}, compute capability {wanted} and widths of "
            f"multiples of {self.multiple}. Here are torch {torch.__version__}, device {device} with {has}, "
            f"in_features {in_features} and out_features {out_features}: use backend='emulated' or 'auto' for the same "
            "numbers on any device"
        )
