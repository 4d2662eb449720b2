"""The blockwise FP8 kernels in Triton's interpreter, against float64. Run by test_fp8_blockwise.py, not by hand:

the interpreter must be chosen before Triton is imported, so TRITON_INTERPRET=1 is set for a process of its own. Prints
a line for each case, and an error with the place of the first wrong value otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from helpers.comparing import assert_close
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.recipes import FP8Blockwise
from trimtab.experts.recipes.base import Way
from trimtab.experts.recipes.hardware import BlockwiseEngine, Engine, Packed
from trimtab.kernels.fp8_blockwise import BLOCK, blockwise_groups, blockwise_rows

FP8 = torch.float8_e4m3fn
SIZES = ([1, 0, 2], [0, 0, 0], [0, 3, 0], [1], [0, 0, 1, 0, 1])
WIDE = {"wide": True, "dtype": torch.float32}


class WideEngine(BlockwiseEngine):
    """Its kernels as the interpreter runs them."""

    def by_rows(self, x: Packed, w: Packed, offsets_e: Tensor) -> Tensor:
        return blockwise_rows(*x, *w, offsets_e, **WIDE)

    def by_groups(self, x: Packed, w: Packed, offsets_e: Tensor) -> Tensor:
        return blockwise_groups(*x, *w, offsets_e, **WIDE)


@dataclass(frozen=True, kw_only=True)
class Interpreted(FP8Blockwise):
    """On the kernels themselves, here."""

    def check(self, device: torch.device, in_features: int, out_features: int) -> Way:
        return "hardware"

    def engine(self) -> Engine:
        return WideEngine()


def values(*shape: int, seed: int) -> Tensor:
    return (100 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).clamp(-448, 448).to(FP8)


def scales(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def spread(scale: Tensor, *dims: int) -> Tensor:
    for dim in dims:
        scale = scale.repeat_interleave(BLOCK, dim)
    return scale.double()


def rows_times_weights(sizes: list[int], tail: int) -> None:
    cuts, e, c, n = torch.tensor([0, *sizes]).cumsum(0) * BLOCK, len(sizes), 2 * BLOCK, 3 * BLOCK
    used, rows = int(cuts[-1]), int(cuts[-1]) + tail * BLOCK
    x, x_scale = values(rows, c, seed=0), scales(rows, c // BLOCK, seed=1)
    w, w_scale = values(e, n, c, seed=2), scales(e, n // BLOCK, c // BLOCK, seed=3)
    x_scale[used:] = torch.nan
    with FlopCounterMode(display=False) as counter:
        y = blockwise_rows(x, x_scale, w, w_scale, cuts, **WIDE)
    assert counter.get_total_flops() == 2 * rows * c * n
    a, b = x.double() * spread(x_scale, 1), w.double() * spread(w_scale, 1, 2)
    for i in range(e):
        s = slice(int(cuts[i]), int(cuts[i + 1]))
        assert_close(y[s], a[s] @ b[i].t(), 2e-6, f"expert {i}")
    assert y[used:].isnan().all(), "the tail is not as the memory was"


def columns_times_columns(sizes: list[int]) -> None:
    cuts, e, a_width, b_width = torch.tensor([0, *sizes]).cumsum(0) * BLOCK, len(sizes), BLOCK, 2 * BLOCK
    rows = int(cuts[-1]) + BLOCK
    x, x_scale = values(a_width, rows, seed=0), scales(rows // BLOCK, a_width, seed=1)
    dy, dy_scale = values(b_width, rows, seed=2), scales(rows // BLOCK, b_width, seed=3)
    x_scale[-1] = torch.nan
    with FlopCounterMode(display=False) as counter:
        dw = blockwise_groups(x, x_scale, dy, dy_scale, cuts, **WIDE)
    assert counter.get_total_flops() == 2 * rows * a_width * b_width
    a, b = x.double() * spread(x_scale, 0).t(), dy.double() * spread(dy_scale, 0).t()
    for i in range(e):
        s = slice(int(cuts[i]), int(cuts[i + 1]))
        assert_close(dw[i], a[:, s] @ b[:, s].t(), 2e-6, f"expert {i}")


def every_value_of_the_format() -> None:
    """What the interpreter reads from a byte is what torch reads."""
    every = torch.arange(256, dtype=torch.uint8).view(FP8)
    x = every[every.float().isfinite()].repeat(BLOCK)[: BLOCK * BLOCK].view(BLOCK, BLOCK).contiguous()
    one, cuts = torch.ones(BLOCK, 1), torch.tensor([0, BLOCK])
    y = blockwise_rows(x, one, torch.eye(BLOCK).to(FP8)[None].contiguous(), torch.ones(1, 1, 1), cuts, **WIDE)
    assert torch.equal(y, x.float())


def a_layer(sizes: list[int]) -> None:
    """GroupedLinear on these kernels against its emulation: output and every gradient."""
    found = []
    for recipe in (Interpreted(backend="hardware"), FP8Blockwise(backend="emulated")):
        torch.manual_seed(0)
        layer = GroupedLinear(len(sizes), BLOCK, 2 * BLOCK, recipe=recipe)
        x, dy = torch.randn(sum(sizes) + 3, BLOCK), torch.randn(sum(sizes) + 3, 2 * BLOCK)
        x[sum(sizes) :] = dy[sum(sizes) :] = torch.nan
        y = layer(x.requires_grad_(), sizes)
        y.backward(dy)
        found.append([y, x.grad, layer.weight.grad, layer.bias.grad])
    for name, got, wanted in zip(("y", "dx", "dw", "db"), *found, strict=True):
        assert_close(got, wanted, 4e-6, f"layer {sizes}: {name}")


def main() -> None:
    torch.use_deterministic_algorithms(True)  # fresh memory holds NaN
    every_value_of_the_format()
    print("every value of the format")
    for sizes in SIZES:
        for tail in (0, 1):
            rows_times_weights(sizes, tail)
            print(f"rows {sizes} tail {tail}")
        columns_times_columns(sizes)
        print(f"columns {sizes}")
    for sizes in ([3, 0, 130, 1], [0, 0, 0, 0]):
        a_layer(sizes)
        print(f"layer {sizes}")


if __name__ == "__main__":
    main()
