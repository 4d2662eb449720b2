"""Files of loads over a run, one JSON line a step, and the picture of one: load by layer and expert, imbalance by step,
and that of ranks where experts are copied.

A line is {"step": …, "layers": {name: a record of `trimtab.routing.loads.load_metrics`}}, with whatever else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trimtab.errors import first_line


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file, in order."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def draw_loads(metrics: Path, png: Path) -> str | None:
    """Draw every layer's load per expert over the run, and its `max_vio` by step, to `png`.

    Returns None, or why there is no picture: matplotlib is an extra, and a run whose model is saved has not failed.
    """
    try:
        _draw(metrics, png)
    except ImportError:
        return "not drawn: matplotlib is missing (pip install 'trimtab[plot]')"
    except Exception as error:
        return f"not drawn: {first_line(error, typed=True)}"
    return None


def _draw(metrics: Path, png: Path) -> None:
    from matplotlib.figure import Figure

    totals: dict[str, list[int]] = {}
    steps: list[int] = []
    vio: dict[str, list[float]] = {}
    busiest: dict[str, list[float]] = {"before": [], "after": []}
    for record in read_metrics(metrics):
        steps.append(record["step"])
        for name, layer in record["layers"].items():
            loads = layer["tokens_per_expert"]
            totals[name] = [a + b for a, b in zip(totals.get(name, [0] * len(loads)), loads, strict=True)]
            vio.setdefault(name, []).append(layer["max_vio"])
        copied = [layer["replicated"] for layer in record["layers"].values() if "replicated" in layer]
        for when, values in busiest.items():
            values.append(max((layer[f"busiest_{when}"] for layer in copied), default=float("nan")))
    if not totals:
        raise ValueError("no step was taken")
    width = max(map(len, totals.values()))
    mean = {name: max(sum(loads), 1) / len(loads) for name, loads in totals.items()}
    # Layers with fewer experts leave their last cells blank.
    cells = [[n / mean[k] for n in v] + [float("nan")] * (width - len(v)) for k, v in totals.items()]

    balanced = any(value == value for value in busiest["after"])
    figure = Figure(figsize=(15 if balanced else 11, 2.5 + 0.3 * len(cells)), layout="constrained")
    heat, lines, *of_ranks = figure.subplots(1, 3 if balanced else 2, width_ratios=[3, 2, 2] if balanced else [3, 2])
    image = heat.imshow(cells, aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
    figure.colorbar(image, ax=heat, label="load / mean load")
    heat.set(xlabel="expert", ylabel="layer", title=f"load over {len(steps)} steps")
    heat.set_yticks(range(len(cells)), [_short(name) for name in totals])
    for name, values in vio.items():
        lines.plot(steps, values, linewidth=1, label=_short(name))
    lines.set(xlabel="step", ylabel="max_vio = (max - mean) / mean", title="imbalance by step")
    lines.set_ylim(bottom=0)
    if len(vio) <= 8:
        lines.legend(title="layer", fontsize="small")
    for ranks in of_ranks:
        for when, style in (("before", "--"), ("after", "-")):
            ranks.plot(steps, busiest[when], style, linewidth=1, label=f"{when} replicas of experts")
        ranks.set(xlabel="step", ylabel="rows of the busiest rank / mean", title="ranks, worst layer")
        ranks.set_ylim(bottom=1)
        ranks.legend(fontsize="small")
    figure.savefig(png, dpi=120)


def _short(name: str) -> str:
    return next((part for part in name.split(".") if part.isdigit()), name)
