"""The table of docs/recipes.md says what the code says."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from recipe_cases import RECIPES

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"
DOCUMENTED = {
    "`fp8_delayed`": "fp8_delayed",
    "`fp8_current`": "fp8_current",
    "`fp8_rowwise`": "fp8_rowwise",
    "`fp8_blockwise`": "fp8_blockwise",
    "`mxfp8`": "mxfp8",
    "`mxfp8 (ceil)`": "mxfp8_ceil",
    "`nvfp4`": "nvfp4",
}


@pytest.mark.parametrize("row", DOCUMENTED)
def test_the_table_is_the_code_s(row: str) -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {row} |")]
    cells = [cell.strip() for cell in lines[0].strip("|").split("|")]
    _, _, _, _, alignment, bits, elements, measured, bounds = cells
    recipe = RECIPES[DOCUMENTED[row]]
    bound = recipe.error_bound()
    forward, gradient = (float(Fraction(text)) for text in elements.split(", "))
    assert int(alignment) == recipe.alignment
    assert float(bits) == recipe.formats().activation.bits
    assert forward == pytest.approx(bound.activation.relative, abs=1e-6)
    assert gradient == pytest.approx(bound.gradient.relative, abs=1e-6)
    assert bounds == f"{bound.forward:.3f}, {bound.backward:.3f}"
    limits = (bound.forward, bound.backward, bound.backward)
    assert all(float(error) <= limit for error, limit in zip(measured.split(", "), limits, strict=True))
