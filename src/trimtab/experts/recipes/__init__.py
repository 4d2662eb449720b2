"""Low-precision recipes. See `trimtab.experts.recipes.base` for what a recipe is, docs/recipes.md for a table.

Names are imported when they are first used: a layer without a recipe loads none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.experts.recipes.base import Recipe as Recipe
    from trimtab.experts.recipes.base import RecipeState as RecipeState
    from trimtab.experts.recipes.fp8 import MXFP8 as MXFP8
    from trimtab.experts.recipes.fp8 import FP8Blockwise as FP8Blockwise
    from trimtab.experts.recipes.fp8 import FP8Current as FP8Current
    from trimtab.experts.recipes.fp8 import FP8Rowwise as FP8Rowwise
    from trimtab.experts.recipes.fp8_delayed import FP8Delayed as FP8Delayed
    from trimtab.experts.recipes.nvfp4 import NVFP4 as NVFP4

_HOMES = {
    "FP8Blockwise": "fp8", "FP8Current": "fp8", "FP8Delayed": "fp8_delayed", "FP8Rowwise": "fp8", "MXFP8": "fp8",
    "NVFP4": "nvfp4", "Recipe": "base", "RecipeState": "base",
}  # fmt: skip

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
