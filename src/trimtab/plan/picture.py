"""The picture of a step's memory: what is alive at each operator of each stage, by what it is for."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from trimtab.extras import install
from trimtab.plan.layouts import Layout
from trimtab.plan.ledger import CATEGORIES


def draw(layout: Layout, png: Path) -> str:
    """Draw a layout that was planned. Returns the file's name, or why there is no picture: matplotlib is an extra."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it draws without a home too, and says so at length
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return f"not drawn: matplotlib is missing ({install('matplotlib')})"
    assert layout.stages is not None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes, begin = figure.subplots(), 0
    bytes_nC = torch.cat([points.bytes for points in layout.stages.points.values()]).double() / 1e9
    axes.stackplot(range(len(bytes_nC)), *bytes_nC.T.tolist(), labels=CATEGORIES, step="post", linewidth=0)
    for name, points in layout.stages.points.items():
        axes.axvline(begin, color="0.5", linewidth=0.5)
        axes.text(begin, 1.01, name, transform=axes.get_xaxis_transform(), rotation=30, fontsize="x-small")
        begin += len(points.bytes)
    if layout.device.bytes is not None:
        axes.axhline(layout.device.room / 1e9, color="black", linestyle="--", linewidth=1)
    axes.set(xlabel="operators of the stages in which a step holds the most", ylabel="GB of a rank")
    axes.set_xlim(0, len(bytes_nC) - 1)
    axes.legend(loc="lower right", fontsize="small", ncols=2)
    figure.savefig(png, dpi=120)
    return str(png)
