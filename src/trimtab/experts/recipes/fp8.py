"""FP8 with scales taken from the data: one per expert, per contracted vector, per block of 128, or of 32 (MXFP8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from trimtab.errors import ConfigError
from trimtab.experts.recipes.base import Along, Recipe, Role
from trimtab.experts.recipes.hardware import Engine, MXFP8Engine, RowwiseEngine
from trimtab.experts.recipes.numbers import E4M3, E5M2, ElementFormat, Scale, e8m0_scale, float_scale


@dataclass(frozen=True, kw_only=True)
class FP8Current(Recipe):
    """One scale per expert and operand: of its segment, or of its matrix (arXiv 2209.05433).

    hybrid: gradients in E5M2, for its range, rather than in E4M3.
    """

    hybrid: bool = True

    name = "fp8_current"
    alignment = 16  # bytes, of the contracted axis of an FP8 operand: wgrad contracts the rows

    def form(self, role: Role) -> ElementFormat:
        return E5M2 if self.hybrid and role == "gradient" else E4M3

    def block(self, role: Role, along: Along) -> tuple[int, int]:
        return 0, 0


@dataclass(frozen=True, kw_only=True)
class FP8Rowwise(Recipe):
    """One scale per contracted vector: per token, per output feature; in wgrad per feature of each expert. All in E4M3.

    power_of_two: scales are powers of two, so that scaling itself loses nothing.
    """

    power_of_two: bool = False

    name = "fp8_rowwise"
    alignment = 16

    def block(self, role: Role, along: Along) -> tuple[int, int]:
        return (0, 1) if along in ("column", "in") else (1, 0)

    def scale(self, amax: Tensor, form: ElementFormat) -> Scale:
        return float_scale(amax, form, exact=self.power_of_two)

    def engine(self) -> Engine | None:
        return RowwiseEngine()


@dataclass(frozen=True, kw_only=True)
class FP8Blockwise(FP8Rowwise):
    """One scale per 128 contracted values of rows, per 128 x 128 of a weight (arXiv 2412.19437, 3.3.2). All in E4M3.

    power_of_two: scales are powers of two. Then rounding twice, in either direction, changes nothing.
    """

    power_of_two: bool = True

    name = "fp8_blockwise"
    alignment = 128  # wgrad's blocks lie along the rows
    no_engine = "torch has no grouped product for it"

    def block(self, role: Role, along: Along) -> tuple[int, int]:
        if role == "weight":
            return 128, 128
        return (1, 128) if along == "row" else (128, 1)

    def engine(self) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class MXFP8(FP8Current):
    """One power of two (E8M0) as the scale of 32 contracted values of every operand (OCP Microscaling v1.0).

    scale_rounding: "floor" as in the specification, where values may saturate; "ceil" as in the training stacks
        (arXiv 2506.08027), where none does. What then rounds up to 2 ** 128 is Inf in float32.
    hybrid: gradients in E5M2 rather than in E4M3.
    """

    scale_rounding: Literal["floor", "ceil"] = "floor"
    hybrid: bool = False

    name = "mxfp8"
    alignment = 32  # wgrad's blocks lie along the rows

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale_rounding not in ("floor", "ceil"):
            raise ConfigError(f"scale_rounding {self.scale_rounding!r}: choose 'floor' or 'ceil'")

    def block(self, role: Role, along: Along) -> tuple[int, int]:
        return (32, 1) if along in ("column", "in") else (1, 32)

    def scale(self, amax: Tensor, form: ElementFormat) -> Scale:
        return e8m0_scale(amax, form, ceil=self.scale_rounding == "ceil")

    def engine(self) -> Engine | None:
        return None if self.hybrid else MXFP8Engine()  # the kernel takes E4M3 only
