"""FP8 with scales taken from the data: one per expert, per contracted vector, per block of 128, or of 32 (MXFP8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from trimtab.errors import ConfigError
from trimtab.experts.recipes.base import Along, Engine, Recipe, Role
from trimtab.experts.recipes.hardware import BlockwiseEngine, MXFP8Engine, RowwiseEngine
from trimtab.experts.recipes.numbers import E4M3, E5M2, ElementFormat, Scale, e8m0_scale, float_scale


@dataclass(frozen=True, kw_only=True)
class FP8Current(Recipe):
    """One scale per expert and operand: of its segment, or of its matrix (arXiv 2209.05433).

    hybrid: gradients in E5M2, for its range, rather than in E4M3.
    """

    hybrid: bool = True

    name: ClassVar[str] = "fp8_current"
    alignment: ClassVar[int] = 16  # bytes, of the contracted axis of an FP8 operand: wgrad contracts the rows
    kernel: ClassVar[str] = "one FP8 GEMM per expert (torch.nn.functional.scaled_mm, tensor-wise scales)"
    capabilities: ClassVar[tuple[tuple[int, int], ...]] = ((8, 9), (9, 0), (10, 0))
    multiple: ClassVar[int] = 16

    def form(self, role: Role) -> ElementFormat:
        return E5M2 if self.hybrid and role == "gradient" else E4M3

    def block(self, role: Role, along: Along) -> tuple[int, int]:
        return 0, 0

    def scale(self, amax: Tensor, form: ElementFormat) -> Scale:
        return float_scale(amax, form)


@dataclass(frozen=True, kw_only=True)
class FP8Rowwise(Recipe):
    """One scale per contracted vector: per token, per output feature; in wgrad per feature of each expert. All in E4M3.

    power_of_two: scales are powers of two, so that scaling itself loses nothing.
    """

    power_of_two: bool = False

    name: ClassVar[str] = "fp8_rowwise"
    alignment: ClassVar[int] = 16
    kernel: ClassVar[str] = "torch.nn.functional.scaled_grouped_mm with row-wise scales"
    capabilities: ClassVar[tuple[tuple[int, int], ...]] = ((9, 0),)
    multiple: ClassVar[int] = 16

    def block(self, role: Role, along: Along) -> tuple[int, int]:
        return (0, 1) if along in ("column", "in") else (1, 0)

    def scale(self, amax: Tensor, form: ElementFormat) -> Scale:
        return float_scale(amax, form, exact=self.power_of_two)

    def engine(self) -> Engine:
        return RowwiseEngine()


@dataclass(frozen=True, kw_only=True)
class FP8Blockwise(Recipe):
    """One scale per 128 contracted values of rows, per 128 x 128 of a weight (arXiv 2412.19437, 3.3.2). All in E4M3.

    power_of_two: scales are powers of two. Then quantizing twice, in either direction, changes nothing.
    """

    power_of_two: bool = True

    name: ClassVar[str] = "fp8_blockwise"
    alignment: ClassVar[int] = 128  # wgrad's blocks lie along the rows
    kernel: ClassVar[str] = "trimtab.kernels.fp8_blockwise (Triton)"
    capabilities: ClassVar[tuple[tuple[int, int], ...]] = ((9, 0),)
    multiple: ClassVar[int] = 128

    def block(self, role: Role, along: Along) -> tuple[int, int]:
        if role == "weight":
            return 128, 128
        return (1, 128) if along == "row" else (128, 1)

    def scale(self, amax: Tensor, form: ElementFormat) -> Scale:
        return float_scale(amax, form, exact=self.power_of_two)

    def engine(self) -> Engine:
        return BlockwiseEngine()


@dataclass(frozen=True, kw_only=True)
class MXFP8(Recipe):
    """One power of two (E8M0) as the scale of 32 contracted values of every operand (OCP Microscaling v1.0).

    scale_rounding: "floor" as in the specification, where values may saturate; "ceil" as in the training stacks
        (arXiv 2506.08027), where none does. What then rounds up to 2 ** 128 is Inf in float32.
    hybrid: gradients in E5M2 rather than in E4M3.
    """

    scale_rounding: Literal["floor", "ceil"] = "floor"
    hybrid: bool = False

    name: ClassVar[str] = "mxfp8"
    alignment: ClassVar[int] = 32  # wgrad's blocks lie along the rows
    kernel: ClassVar[str] = "torch.nn.functional.scaled_grouped_mm with 1x32 E8M0 scales"
    capabilities: ClassVar[tuple[tuple[int, int], ...]] = ((10, 0),)
    multiple: ClassVar[int] = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale_rounding not in ("floor", "ceil"):
            raise ConfigError(f"scale_rounding {self.scale_rounding!r}: choose 'floor' or 'ceil'")

    def form(self, role: Role) -> ElementFormat:
        return E5M2 if self.hybrid and role == "gradient" else E4M3

    def block(self, role: Role, along: Along) -> tuple[int, int]:
        return (32, 1) if along in ("column", "in") else (1, 32)

    def scale(self, amax: Tensor, form: ElementFormat) -> Scale:
        return e8m0_scale(amax, form, ceil=self.scale_rounding == "ceil")

    def engine(self) -> Engine | None:
        return None if self.hybrid else MXFP8Engine()  # the kernel takes E4M3 only
