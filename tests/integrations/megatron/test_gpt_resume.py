"""A GPTModel is saved in Megatron's distributed checkpoints, with its optimizer, and gone on with: by the same layers
to the bit, by Megatron's and ours in turn to six digits.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.megatron_gpt import Layout, Run, assert_alike, resumed, trained

TWO = Layout(2, ep=2)


@pytest.mark.xdist_group("ranks2")
def test_from_megatron_to_trimtab_and_back(tmp_path: Path) -> None:
    kinds = ("megatron", "experts", "exchange", "megatron")
    steps = resumed(TWO, [Run(kind, steps=2) for kind in kinds], tmp_path)
    (expected,) = trained(TWO, [Run(steps=8)])
    assert_alike(steps, expected)


@pytest.mark.megatron_full
@pytest.mark.xdist_group("ranks2")
@pytest.mark.parametrize("kind", ["experts", "exchange", "grouped"])
def test_bit_equal_going_on(kind: str, tmp_path: Path) -> None:
    steps = resumed(TWO, [Run(kind, steps=3), Run(kind, steps=3)], tmp_path)
    assert [steps] == trained(TWO, [Run(kind)])
