"""What all recipes share: the backend, named on purpose, and the refusal where it cannot run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

import torch

from trimtab.errors import BackendError
from trimtab.experts.recipes.base import Backend, RecipeState, Way
from trimtab.experts.recipes.describe import ErrorBound, Formats
from trimtab.experts.recipes.engine import Engine
from trimtab.experts.recipes.machine import Hardware, check_backend_name, missing
from trimtab.options import check_flags


@dataclass(frozen=True, kw_only=True)
class RecipeBase:
    """Fields and methods of every recipe.

    backend: "emulated" computes the same values with ordinary arithmetic, on any device, slowly; "hardware" is
        refused by `check` where it cannot run; "auto" is hardware where it can run and emulation elsewhere, and the
        layer says which. None is a default: nobody emulates without having said so.
    """

    name: ClassVar[str]
    alignment: ClassVar[int]

    backend: Backend

    def __post_init__(self) -> None:
        check_backend_name(self.backend)
        check_flags(**{f.name: getattr(self, f.name) for f in fields(self) if f.type in (bool, "bool")})

    def hardware(self) -> Hardware:
        """The real kernel that computes these products, and what it runs on."""
        raise NotImplementedError

    def formats(self) -> Formats:
        """What is stored of each operand."""
        raise NotImplementedError

    def error_bound(self) -> ErrorBound:
        """How far elements and products can be off. Formulas in `describe`."""
        raise NotImplementedError

    def state(self) -> RecipeState:
        """See `Recipe.state`."""
        raise NotImplementedError

    def engine(self) -> Engine | None:
        """The kernel that multiplies quantised operands as they are stored; None where trimtab calls none."""
        return None

    def check(self, device: torch.device, in_features: int, out_features: int) -> Way:
        """See `Recipe.check`. Emulation takes every device and every width: blocks at an edge may be cut short."""
        if self.backend == "emulated":
            return "emulated"
        fault = missing(self.name, self.hardware(), device, in_features, out_features)
        if fault is None:
            return "hardware"
        if self.backend == "auto":
            return "emulated"
        raise BackendError(f"{fault}: use backend='emulated' or 'auto' for the same numbers on any device")
