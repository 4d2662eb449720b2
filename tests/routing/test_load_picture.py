"""The picture of a run's loads: white is the mean load, red is more, blue is less, gray is no expert."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trimtab.routing.loads import draw_loads, load_metrics

Color = tuple[float, float, float]


def colors(loads: dict[str, list[int]], folder: Path) -> set[Color]:
    """Colors of the map's cells that cover more than a hundredth of the picture."""
    image = pytest.importorskip("matplotlib.image")
    record = {"step": 1, "layers": {name: load_metrics(counts) for name, counts in loads.items()}}
    (folder / "metrics.jsonl").write_text(json.dumps(record))
    assert draw_loads(folder / "metrics.jsonl", folder / "load.png") is None
    pixels = image.imread(folder / "load.png")[..., :3]
    half = [tuple(map(float, pixel)) for row in pixels[:, : pixels.shape[1] // 2] for pixel in row]
    return {color for color in set(half) if half.count(color) > len(half) / 100 and color != (1, 1, 1)}


def test_the_mean_is_white_more_is_red_and_less_is_blue(tmp_path: Path) -> None:
    (even,) = colors({"0": [5, 5, 5, 5]}, tmp_path)
    assert min(even) > 0.95
    less, more = sorted(colors({"0": [4, 4, 6, 6]}, tmp_path))
    assert less[2] > less[0] + 0.05
    assert more[0] > more[2] + 0.05


def test_a_place_without_an_expert_is_gray(tmp_path: Path) -> None:
    gray, even = sorted(colors({"0": [5, 5, 5, 5], "1": [5, 5]}, tmp_path))
    assert max(gray) - min(gray) < 0.01
    assert max(gray) < 0.9 < min(even)
