"""The C++ kernels' adapters and codes on a small SwiGLU expert MLP, against the same in float64.

Legend: M rows, R expert rows, E experts, D model dim, F expert hidden dim, I = 2F, r an adapter's rank.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

from trimtab.experts.quantized import FORMATS, decoded, scales_of
from trimtab.kernels.compiled import CODES, CompiledKernels
from trimtab.kernels.expert_check import BOUNDS, E, Problem, by_cpu, wave

SIZES = (29, 288, 64)
"""M, D, F, which adapters and all formats' blocks divide; D is more values than are added up in one go."""
RANK, SCALE = 8, 0.5
SCALES = {"nf4": 0.25, "int8": 0.25, "fp8": 2.0**-10, "mxfp4": 124}
"""With which codes stand for about as much as weights do."""


def first_adapted_fault(kernels: CompiledKernels) -> str | None:
    """What is wrong with these, None if nothing is. Takes some hundredths of a second."""
    with torch.no_grad():
        for dtype, form in product(BOUNDS, ("", *CODES)):
            p = Adapted(dtype, form)
            made = p.gradients()
            found = by_cpu(kernels, p, threads=torch.get_num_threads(), more=p.fields() | made, trained=False)
            if fault := p.fault_in(found | made, BOUNDS[dtype]):
                return f"experts of {form or 'weights'} with adapters in {dtype}: {fault}"
    return None


class Adapted(Problem):
    """Pairs on both weights, which are codes of `form` unless that is ""."""

    def __init__(self, dtype: torch.dtype, form: str) -> None:
        super().__init__(SIZES, dtype, dtype)
        _, D, F = SIZES
        self.form, self.codes = form, {}
        if form:
            self.codes = {"up": _codes(form, E, 2 * F, D), "down": _codes(form, E, D, F)}
            self.up, self.down = (decoded(*self.codes[name], form, dtype) for name in ("up", "down"))
        shapes = {"up_a": (E, RANK, D), "up_b": (E, 2 * F, RANK), "down_a": (E, RANK, F), "down_b": (E, D, RANK)}
        self.pairs = {name: wave(*s, step=0.3 + i, dtype=dtype) * 0.25 for i, (name, s) in enumerate(shapes.items())}
        self.truth = self._true()

    def _true(self) -> dict[str, Tensor]:
        """Of a weight's gradient G come SCALE b^T G and SCALE G a^T."""
        t = {name: pair.double() for name, pair in self.pairs.items()}
        up, down = (self.__dict__[name].double() + SCALE * t[f"{name}_b"] @ t[f"{name}_a"] for name in ("up", "down"))
        found = self.true_with(up, down)
        for name in ("up", "down"):
            grad = found.pop(f"d_{name}")
            found[f"d_{name}_a"] = SCALE * t[f"{name}_b"].mT @ grad
            found[f"d_{name}_b"] = SCALE * grad @ t[f"{name}_a"].mT
        return found

    def fields(self) -> dict[str, Any]:
        found: dict[str, Any] = {"rank_up": RANK, "rank_down": RANK, "scale_up": SCALE, "scale_down": SCALE}
        found |= self.pairs
        thin = [f"{kind}_{name}" for kind in "uv" for name in ("up", "down")]
        found |= {name: self.x.new_full((self.rows, RANK), torch.nan) for name in thin}
        if self.form:
            found["type_weights"] = CODES[self.form]
            for name, (codes, scales) in self.codes.items():
                found |= {name: codes, f"{name}_scales": scales}
        return found

    def gradients(self) -> dict[str, Tensor]:
        return {f"d_{name}": torch.full(pair.shape, torch.nan) for name, pair in self.pairs.items()}


def _codes(form: str, *shape: int) -> tuple[Tensor, Tensor]:
    """Every byte that stands for numbers, and scales, for weights of this shape."""
    *lead, ins = shape
    count = torch.Size(lead).numel() * ins // FORMATS[form].per_byte
    codes = (torch.arange(count) * 37 % (127 if form == "fp8" else 256)).to(torch.uint8)  # e4m3 has NaN at 127
    if form == "fp8":
        codes |= (torch.arange(count) % 3 == 0).to(torch.uint8) << 7
    codes = codes.view(*lead, -1)
    return codes, torch.full(scales_of(codes, form), SCALES[form], dtype=FORMATS[form].scales)
