"""How evenly routers load the experts: numbers for files and trackers, and the picture of a run.

A file has one line a step, {"step": …, "layers": {name: a record of `load_metrics`}}, with whatever else.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trimtab.errors import first_line
from trimtab.extras import install


def load_metrics(tokens_per_expert: list[int], dropped: int = 0) -> dict[str, Any]:
    """One layer's record: `max_vio` = (max load - mean load) / mean load, `dead_experts`, `entropy` of the load over
    that of an even one (1 even, 0 all on one expert or on none), `drop_rate` of the slots, `tokens_per_expert`.

    dropped: slots for which an expert had no room; they are in no load.
    """
    total = sum(tokens_per_expert)
    mean = total / len(tokens_per_expert)
    shares = [count / total for count in tokens_per_expert if count]
    most = math.log(max(len(tokens_per_expert), 2))
    return {
        "max_vio": (max(tokens_per_expert) - mean) / mean if mean else 0.0,
        "dead_experts": tokens_per_expert.count(0),
        "entropy": -sum(share * math.log(share) for share in shares) / most + 0.0,  # no -0.0
        "drop_rate": dropped / max(total + dropped, 1),
        "tokens_per_expert": tokens_per_expert,
    }


def load_scalars(layers: dict[str, dict[str, Any]], most_keys: int = 64) -> dict[str, float]:
    """Numbers for a tracker, from records of `load_metrics` by layer: what the worst layer has, the mean over layers,
    and single layers as far as `most_keys` goes; where it does not, some from the first to the last, evenly apart.

    Keys are `loads/NAME` and `loads/NAME/LAYER`, of which there are never more than `most_keys` (at least 5), whatever
    the model. Tokens per expert are not among them. No layers, no numbers. With `replicate_experts=` there are also
    `busiest_before` and `busiest_after`, rows of the busiest rank over the mean, without replicas and with them (worst
    layer), `replicas` and `replica_bytes`, what was sent (all layers), where 9 keys have room.
    """
    if not layers:
        return {}
    records = list(layers.values())
    found = {
        "loads/max_vio": max(record["max_vio"] for record in records),
        "loads/max_vio_mean": sum(record["max_vio"] for record in records) / len(records),
        "loads/dead_experts": float(sum(record["dead_experts"] for record in records)),
        "loads/entropy": min(record["entropy"] for record in records),
        "loads/drop_rate": max(record["drop_rate"] for record in records),
    }
    copied = [record["replicated"] for record in records if "replicated" in record]
    if copied and most_keys >= len(found) + 4:
        found |= {f"loads/{name}": max(one[name] for one in copied) for name in ("busiest_before", "busiest_after")}
        found |= {f"loads/{name}": float(sum(one[name] for one in copied)) for name in ("replicas", "replica_bytes")}
    each = ("max_vio", "dead_experts", "entropy", "drop_rate")
    room = min(max(most_keys - len(found), 0) // len(each), len(records))
    numbers = [round(i * (len(records) - 1) / max(room - 1, 1)) for i in range(room)]
    return found | {f"loads/{name}/{number}": float(records[number][name]) for name in each for number in numbers}


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
        return f"not drawn: matplotlib is missing ({install('matplotlib')})"
    except Exception as error:
        return f"not drawn: {first_line(error, typed=True)}"
    return None


def _draw(metrics: Path, png: Path) -> None:
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it draws without a home too, and says so at length
    from matplotlib.colors import TwoSlopeNorm
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
    # Layers with fewer experts leave their last cells gray.
    cells = [[n / mean[k] for n in v] + [float("nan")] * (width - len(v)) for k, v in totals.items()]

    balanced = any(value == value for value in busiest["after"])
    figure = Figure(figsize=(15 if balanced else 11, 2.5 + 0.3 * len(cells)), layout="constrained")
    heat, lines, *of_ranks = figure.subplots(1, 3 if balanced else 2, width_ratios=[3, 2, 2] if balanced else [3, 2])
    most = max(2.0, *(value for row in cells for value in row if value == value))
    norm = TwoSlopeNorm(vmin=0, vcenter=1, vmax=most)  # white is the mean load
    image = heat.imshow(cells, aspect="auto", cmap="RdBu_r", norm=norm, interpolation="nearest")
    heat.set_facecolor("0.8")
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
