"""The weight of one product of all local experts: values or codes, biases, LoRA factors, as one value.

    y[segment i] = x[segment i] W_i^T + b_i + scale * (dropout(x[segment i]) a_i^T) b_i^T

`tensors` has what there is in the one order that autograd, operators, sinks and routes use; `form` says the rest
in a word. LoRA: Hu et al. 2021, arXiv 2106.09685; the delta b a is never built.

Legend: e groups (experts), r rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trimtab.autograd import computed_in


@dataclass(slots=True, kw_only=True, eq=False)
class LoraFactors:
    """Low-rank factors beside a weight [e, out, in].

    a: [e, r, in], or [1, r, in] that all groups share. b: [e, out, r] or [1, out, r], its rows in the order of the
    weight's outputs. dropout: of the rows that go into `a`; 0 outside of training.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0
    dropout: float = 0.0

    @property
    def rank(self) -> int:
        return self.a.shape[1]


class Form(NamedTuple):
    """What `GroupedWeight.form` says. values, biases: how many tensors, 0 values for one of all groups. behind: where
    scales and factors begin. lora: its scale and its dropout."""

    values: int
    biases: int
    behind: int
    transposed: bool
    format: str
    lora: tuple[float, float] | None

    @staticmethod
    def read(form: str) -> Form:
        """`GroupedWeight.form`, read."""
        values, biases, transposed, format, *lora = form.split(" ")
        pair = (float(lora[0]), float(lora[1])) if lora else None
        behind = max(int(values), 1) + int(biases)
        return Form(int(values), int(biases), behind, transposed == "1", format, pair)


form_of = lru_cache(maxsize=256)(Form.read)
"""`Form.read`, for operators, which ask for the same at each call; no graph traces it."""


@dataclass(slots=True, kw_only=True, eq=False)
class GroupedWeight:
    """What multiplies the rows of each group.

    values: one tensor [e, *out, in] of all groups, or e of [out, in]; with `transposed` [e, in, out] or [in, out].
    biases: one [e, *out] or e of [out], or none.
    scales, format: of codes in the place of values, see `trimtab.experts.quantized`; dtype: what they stand for.
    lora: factors that are added.
    """

    values: tuple[Tensor, ...]
    biases: tuple[Tensor, ...] = ()
    scales: Tensor | None = None
    lora: LoraFactors | None = None
    transposed: bool = False
    format: str = ""
    dtype: torch.dtype | None = None

    @property
    def stacked(self) -> bool:
        return self.values[0].ndim > 2

    @property
    def groups(self) -> int:
        shape = self.values[0].shape
        return shape[0] if len(shape) > 2 else len(self.values)

    @property
    def outs(self) -> int:
        """Width of the results."""
        shape = _format(self.format).shape_of(self.values[0]) if self.format else self.values[0].shape
        if self.transposed:
            return shape[-1]
        return shape[1] * shape[2] if len(shape) == 4 else shape[-2]

    @property
    def ins(self) -> int:
        """Width of the rows."""
        shape = _format(self.format).shape_of(self.values[0]) if self.format else self.values[0].shape
        return shape[-2] if self.transposed else shape[-1]

    @property
    def computed_in(self) -> torch.dtype:
        """See `trimtab.autograd.computed_in`."""
        return computed_in(self.values[0], self.dtype)

    @property
    def form(self) -> str:
        """What is no tensor, for an operator's argument."""
        values = 0 if self.values[0].ndim > 2 else len(self.values)
        said = f"{values} {len(self.biases)} {int(self.transposed)} {self.format}"
        return said if self.lora is None else f"{said} {self.lora.scale!r} {self.lora.dropout!r}"

    def tensors(self) -> list[Tensor]:
        """Values, biases, scales, a and b: those that there are."""
        found = [*self.values, *self.biases]
        if self.scales is not None:
            found.append(self.scales)
        if self.lora is not None:
            found += self.lora.a, self.lora.b
        return found

    @staticmethod
    def of(tensors: Sequence[Tensor], form: str) -> GroupedWeight:
        """From `tensors()` and `form`."""
        return _made(tensors, form_of(form))

    def rebuilt(self, tensors: Sequence[Tensor]) -> GroupedWeight:
        """The same of other tensors, which are in the order of `tensors()`."""
        weight = _made(tensors, Form.read(self.form))
        weight.dtype = self.dtype
        return weight


Weights = tuple[GroupedWeight, GroupedWeight]
"""Of an expert MLP: up and down."""


def _made(tensors: Sequence[Tensor], f: Form) -> GroupedWeight:
    if len(tensors) == 1:
        return GroupedWeight(values=(tensors[0],), transposed=f.transposed)
    values = max(f.values, 1)
    weight = GroupedWeight(
        values=tuple(tensors[:values]), biases=tuple(tensors[values : f.behind]), transposed=f.transposed,
        format=f.format,
    )  # fmt: skip
    if f.format:
        weight.scales = tensors[f.behind]
    if f.lora is not None:
        weight.lora = LoraFactors(a=tensors[-2], b=tensors[-1], scale=f.lora[0], dropout=f.lora[1])
    return weight


def _format(name: str) -> Any:
    from trimtab.experts.quantized import FORMATS

    return FORMATS[name]


def row_flops(shapes: Sequence[Sequence[int]], form: str) -> tuple[int, int, int]:
    """Multiplications of one row with the values, with `a` and with `b`, from the shapes of `GroupedWeight.tensors`."""
    f = form_of(form)
    own = prod(shapes[0] if f.values else shapes[0][1:]) * (_format(f.format).per_byte if f.format else 1)
    return (own, 0, 0) if f.lora is None else (own, prod(shapes[-2][1:]), prod(shapes[-1][1:]))


def gradient_flops(shapes: Sequence[Sequence[int]], form: str, wanted: Sequence[bool]) -> int:
    """Multiplications of one row in the gradients that are wanted of these tensors."""
    own, a, b = row_flops(shapes, form)
    values = max(form_of(form).values, 1)
    return own * any(wanted[:values]) + (a * wanted[-2] + b * wanted[-1] if a else 0)
