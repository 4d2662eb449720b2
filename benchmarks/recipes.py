"""Low-precision recipes: how far off the products of each are, as a table in Markdown.

    python -m benchmarks.recipes [--seeds 8] [--width 1024]

Errors are max |err| / max |ref| against float64 for standard normal operands, the largest of the seeds: forward and
dgrad contract `width`, wgrad the rows of a segment. Takes a minute on one core; the numbers depend on no hardware.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from trimtab.experts.recipes import MXFP8, NVFP4, FP8Blockwise, FP8Current, FP8Delayed, FP8Rowwise
from trimtab.experts.recipes.base import Recipe

RECIPES: tuple[Recipe, ...] = (
    FP8Delayed(backend="emulated"),
    FP8Current(backend="emulated"),
    FP8Rowwise(backend="emulated"),
    FP8Blockwise(backend="emulated"),
    MXFP8(backend="emulated"),
    MXFP8(backend="emulated", scale_rounding="ceil"),
    NVFP4(backend="emulated", seed=0),
)
ROWS = 256  # of the one segment; its length does not matter to the others


def relative_error(ours: Tensor, true: Tensor) -> float:
    return float((ours.double() - true).abs().max() / true.abs().max())


def errors(recipe: Recipe, width: int, seed: int) -> Tensor:
    """Of forward, dgrad, wgrad: [3]."""
    g = torch.Generator().manual_seed(seed)
    x, dy = torch.randn(ROWS, width, generator=g), torch.randn(ROWS, width, generator=g)
    w, cuts = torch.randn(1, width, width, generator=g), torch.tensor([0, ROWS])
    state = recipe.state()
    y = state.activation(x, cuts, along="row") @ state.weight(w, along="in")[0]
    dx = state.gradient(dy, cuts, along="row") @ state.weight(w, along="out")[0].t()
    dw = state.activation(x, cuts, along="column").t() @ state.gradient(dy, cuts, along="column")
    xd, dyd, wd = x.double(), dy.double(), w[0].double()
    pairs = ((y, xd @ wd), (dx, dyd @ wd.t()), (dw, xd.t() @ dyd))
    return torch.tensor([relative_error(*pair) for pair in pairs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| recipe | alignment | forward | dgrad | wgrad |")
    print("|---|---|---|---|---|")
    for recipe in RECIPES:
        worst = torch.stack([errors(recipe, args.width, seed) for seed in range(args.seeds)]).amax(0)
        option = " (ceil)" if getattr(recipe, "scale_rounding", "") == "ceil" else ""
        print(f"| {recipe.name}{option} | {recipe.alignment} | {worst[0]:.3f} | {worst[1]:.3f} | {worst[2]:.3f} |")


if __name__ == "__main__":
    main()
