"""Low-precision recipes. See `trimtab.experts.recipes.base` for what a recipe is, docs/recipes.md for a table."""

from trimtab.experts.recipes.base import Recipe, RecipeState
from trimtab.experts.recipes.fp8 import MXFP8, FP8Blockwise, FP8Current, FP8Rowwise
from trimtab.experts.recipes.fp8_delayed import FP8Delayed
from trimtab.experts.recipes.nvfp4 import NVFP4

__all__ = ["MXFP8", "NVFP4", "FP8Blockwise", "FP8Current", "FP8Delayed", "FP8Rowwise", "Recipe", "RecipeState"]
