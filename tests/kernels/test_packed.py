"""Weights packed in panels: every row has the bits that it has of plain ones, whatever the number of rows.

Legend: R expert rows, E experts, D model dim, F expert hidden dim, r rank of LoRA.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.emulated import INSTRUCTIONS, emulated, fenced, own
from trimtab.experts.quantized import quantized
from trimtab.kernels.compiled import ACTIVATIONS, CODES, TYPES, CompiledKernels

pytestmark = pytest.mark.xdist_group("emulated")  # one process compiles what they share
WIDTHS = ((64, 96), (288, 64), (544, 352))
"""D, F: less than is added up in one go, more, and more than is brought at once."""
SIZES = ((1, 0, 2, 3), (9, 14, 65, 40), (600, 0, 330, 1), (0, 0, 0, 0))
"""Rows of each expert: few, some, and as many as are brought beside another order of blocks."""
BACK = ("y", "pre", "dx", "dw", "d_up_a", "d_up_b", "d_down_a", "d_down_b")


@pytest.fixture(scope="module", params=["widened", *INSTRUCTIONS, *(f"own {p}" for p in INSTRUCTIONS)])
def kernels(request: pytest.FixtureRequest) -> CompiledKernels:
    """All products, emulated where they need instructions, and those that this machine has."""
    name = request.param
    return own(name.removeprefix("own ")) if name.startswith("own ") else emulated(name)


class Case:
    """Operands of experts [E, 2F, D] and [E, D, F], each expert's rows its own."""

    def __init__(self, D: int, F: int, dtype: torch.dtype, interleaved: bool) -> None:
        torch.manual_seed(0)
        self.D, self.F, self.dtype, self.interleaved = D, F, dtype, interleaved
        self.plain = [fenced(torch.randn(4, *shape).mul(0.1).to(dtype)) for shape in ((2 * F, D), (D, F))]
        up = self.plain[0]
        parted = torch.cat((up[:, ::2], up[:, 1::2]), 1) if interleaved else up
        self.packed = [fenced(quantized(t, "packed")[0], 1) for t in (parted, self.plain[1])]  # on no boundary

    def run(self, kernels: CompiledKernels, form: str, rows: list[Tensor], r: int = 0, threads: int = 2) -> Any:
        """`BACK` of rows x, dy [R, D] and w [R, 1] of experts with so many each."""
        (x, dy, w, offsets), (D, F), R = rows, (self.D, self.F), len(rows[0])
        up, down = self.packed if form else self.plain

        def nan(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.full(shape, torch.nan, dtype=dtype)

        got: dict[str, Any] = {"y": nan(R, D), "pre": nan(R, 2 * F), "dx": nan(R, D), "dw": torch.zeros(R, 1)}
        torch.manual_seed(1)
        for name, outs, ins in (("up", 2 * F, D), ("down", D, F)) if r else ():
            a, b = (torch.randn(4, *shape).mul(0.1).to(self.dtype) for shape in ((r, ins), (outs, r)))
            got |= {f"{name}_a": a, f"{name}_b": b, f"rank_{name}": r, f"scale_{name}": 0.5}
            got |= {f"{kind}_{name}": nan(R, r) for kind in "uv"}
            got |= {f"d_{name}_{kind}": nan(*t.shape, dtype=torch.float32) for kind, t in (("a", a), ("b", b))}
        act = "clamped_swiglu" if self.interleaved else "swiglu"
        numbers = {"act": ACTIVATIONS.index(act), "interleaved": int(self.interleaved), "alpha": 1.7, "limit": 7.0}
        fields = got | numbers | {
            "type": TYPES[self.dtype], "type_weights": CODES[form] if form else TYPES[self.dtype], "threads": threads,
            "M": R, "R": R, "E": 4, "D": D, "F": F, "row_R": torch.arange(R), "slot_R": torch.arange(R),
            "offsets": offsets, "w": w, "x": x, "dy": dy, "up": up, "down": down,
        }  # fmt: skip
        kernels.forward(fields)
        kernels.backward(fields)
        return {name: got[name] for name in BACK if name in got}


def rows_of(sizes: tuple[int, ...], D: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(2)
    x, dy = torch.randn(2, sum(sizes), D).to(dtype)
    return [x, dy, torch.rand(sum(sizes), 1), torch.tensor((0, *sizes)).cumsum(0)]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_they_have_the_bits_of_plain_ones(
    kernels: CompiledKernels, widths: tuple[int, int], dtype: torch.dtype, interleaved: bool
) -> None:
    case = Case(*widths, dtype, interleaved)
    for i, (sizes, rank) in enumerate(product(SIZES, (0, 8, 40))):  # the rank is part of the last step, or one more
        rows = rows_of(sizes, widths[0], dtype)
        plain, ours = (case.run(kernels, form, rows, rank, 1 + i % 2) for form in ("", "packed"))
        for name, value in plain.items():
            assert torch.equal(ours[name], value), (name, sizes, rank)  # and none is NaN
