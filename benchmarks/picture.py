"""The picture of a page of results: an experts layer, forward and backward, beside dense products and the fastest peer.

    python -m benchmarks.picture benchmarks/results/amd-zen5.md [benchmarks/results/intel-amx.md ...]

It is drawn from the table of the page, beside it, with the page's name (needs matplotlib). Nothing is measured.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

CASE = re.compile(r"([ABC]), (bf16|fp32), (\d+) tokens, (\d+) threads?")
NOTES = (
    "D, F, E, K:  A 512, 256, 64, 8    B 1024, 512, 32, 4    C 1024, 2816, 8, 2\n"
    "1 is dense torch products of as many FLOPs, or one pass over the bytes where that takes longer"
)
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


class Bar(NamedTuple):
    """One case: times over the page's limit, trimtab's by its worse malloc setting, the peer's by its better."""

    shape: str
    dtype: str
    tokens: int
    threads: int
    own: float
    peer: float


def bars(page: str) -> list[Bar]:
    """The cases of one rank, of forward and backward, in a page's table of layers."""
    found = []
    for line in page.partition("## One experts layer")[2].partition("\n## ")[0].splitlines():
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        case = CASE.fullmatch(cells[0])
        if case and cells[1:3] == ["forward+backward", "auto"] and cells[5]:
            ups, over = map(float, cells[8:10]), [float(cell) for cell in cells[12:14]]
            peer = min(up * own for up, own in zip(ups, over, strict=True))
            found.append(Bar(case[1], case[2], int(case[3]), int(case[4]), max(over), peer))
    return sorted(found)


def draw(page: Path) -> None:
    """Draw page.png beside page.md."""
    from matplotlib.figure import Figure

    text = page.read_text()
    found = bars(text)
    (machine,) = re.findall(r"^Machine: (.*)\.$", text, re.MULTILINE)
    cpu, versions = machine.split("; ")
    cases = sorted({(bar.shape, bar.tokens, bar.threads) for bar in found})
    figure = Figure(figsize=(10, 6.8), layout="constrained")
    for panel, (dtype, name) in zip(figure.subplots(1, 2, sharey=True, sharex=True), DTYPES.items(), strict=True):
        chosen = [bar for bar in found if bar.dtype == dtype]
        places = [cases.index((bar.shape, bar.tokens, bar.threads)) for bar in chosen]
        for shift, color, label, values in (
            (-0.2, "#2a6f97", "trimtab", [bar.own for bar in chosen]),
            (0.2, "#c9ada7", "transformers, grouped_mm", [bar.peer for bar in chosen]),
        ):
            panel.barh([place + shift for place in places], values, 0.4, color=color, label=label)
        panel.axvline(1, color="#2b2d42", linewidth=1, label="dense torch products")
        panel.set(xlim=(0, None), title=name, xlabel="time / time of dense torch products")
        panel.set_yticks(range(len(cases)), [f"{s}, {t:,} tokens, {n} thread{'s' * (n > 1)}" for s, t, n in cases])
        panel.spines[["top", "right"]].set_visible(False)
    panel.invert_yaxis()
    title = f"Experts layer, forward and backward: shorter is faster\n{cpu}\n{versions}\n{NOTES}"
    figure.suptitle(title, fontsize=9)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(page.with_suffix(".png"), dpi=100)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        draw(Path(argument))
