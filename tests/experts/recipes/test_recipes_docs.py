"""The table of docs/recipes.md says what the code says, and its snippets run."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from helpers.recipe_bounds import bits_per_value, element_bound, product_bound
from helpers.recipe_cases import RECIPES

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"
DOCUMENTED = {
    "`fp8_delayed`": "fp8_delayed", "`fp8_current`": "fp8_current", "`fp8_rowwise`": "fp8_rowwise",
    "`fp8_blockwise`": "fp8_blockwise", "`mxfp8`": "mxfp8", "`mxfp8 (ceil)`": "mxfp8_ceil", "`nvfp4`": "nvfp4",
}  # fmt: skip


@pytest.mark.parametrize("row", DOCUMENTED)
def test_the_table_is_the_code_s(row: str) -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {row} |")]
    cells = [cell.strip() for cell in lines[0].strip("|").split("|")]
    _, _, _, _, alignment, bits, elements, measured, bounds = cells
    recipe = RECIPES[DOCUMENTED[row]]
    limits = [product_bound(recipe, role) for role in ("activation", "gradient", "gradient")]
    forward, gradient = (float(Fraction(text)) for text in elements.split(", "))
    assert int(alignment) == recipe.alignment
    assert float(bits) == bits_per_value(recipe)
    assert forward == pytest.approx(element_bound(recipe, "activation").relative, abs=1e-6)
    assert gradient == pytest.approx(element_bound(recipe, "gradient").relative, abs=1e-6)
    assert bounds == f"{limits[0]:.3f}, {limits[1]:.3f}"
    assert all(float(error) <= limit for error, limit in zip(measured.split(", "), limits, strict=True))


def test_the_snippets_run_one_after_the_other() -> None:
    names: dict[str, Any] = {}
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(snippets) == 2
    for text in snippets:
        exec(text, names)  # our own page
    true = names["x"][48:64].double() @ names["layer"].weight[3].detach().double().T
    assert names["y_rows"].shape == true.shape == (16, 4096)
    bound = product_bound(names["recipe"], "activation")
    assert 0 < float((names["y_rows"] - true).abs().max() / true.abs().max()) <= bound
