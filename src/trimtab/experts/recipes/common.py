"""What all recipes share: the backend, named on purpose, and the refusal where it cannot run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trimtab.errors import BackendError
from trimtab.experts.recipes.base import Backend, RecipeState
from trimtab.experts.recipes.describe import ErrorBound, Formats
from trimtab.experts.recipes.machine import Hardware, check_backend_name, require


@dataclass(frozen=True, kw_only=True)
class RecipeBase:
    """Fields and methods of every recipe.

    backend: "emulated" computes the same values with ordinary arithmetic, on any device, slowly; "hardware" is
        refused by `check` where it cannot run. Neither is a default: nobody emulates without having said so.
    """

    backend: Backend

    def __post_init__(self) -> None:
        check_backend_name(self.backend)

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def alignment(self) -> int:
        raise NotImplementedError

    def hardware(self) -> Hardware:
        """The real kernel that computes these products, and what it runs on."""
        raise NotImplementedError

    def formats(self) -> Formats:
        """What is stored of each operand."""
        raise NotImplementedError

    def error_bound(self) -> ErrorBound:
        """How far elements and products can be off. Formulas in `describe`."""
        raise NotImplementedError

    def emulation(self) -> RecipeState:
        """A fresh state that emulates, whatever the backend."""
        raise NotImplementedError

    def check(self, device: torch.device, in_features: int, out_features: int) -> None:
        """See `Recipe.check`. Emulation takes every device and every width: blocks at an edge may be cut short."""
        if self.backend == "hardware":
            require(self.name, self.hardware(), device, in_features, out_features)

    def state(self) -> RecipeState:
        """See `Recipe.state`.

        Raises:
            BackendError: backend is "hardware": a state that dequantises would emulate silently.
        """
        if self.backend == "hardware":
            raise BackendError(
                f"recipe {self.name!r} with backend='hardware' has no dequantising state: "
                "call its grouped GEMM (trimtab.experts.recipes.hardware) or use backend='emulated'"
            )
        return self.emulation()
