"""MXFP8: a power of two as the scale of each 32 contracted values of every operand (OCP Microscaling v1.0)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from trimtab.errors import ConfigError
from trimtab.experts.recipes.base import Along, Recipe, Role
from trimtab.experts.recipes.hardware import Engine, MXFP8Engine
from trimtab.experts.recipes.numbers import E4M3, E5M2, ElementFormat, Scale, e8m0_scale


@dataclass(frozen=True, kw_only=True)
class MXFP8(Recipe):
    """One E8M0 scale per 32 contracted values of every operand.

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
