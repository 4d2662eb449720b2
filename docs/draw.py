"""Draws docs/images/*.svg: the map P with its transpose, and who holds what in each parallel layout.

    python docs/draw.py

The pictures are in the repository; this makes them anew after a change.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).parent / "images"
TOKENS = ("#2a6f97", "#e07a5f", "#81b29a", "#f2cc8f")
INK, GRID, PAPER = "#2b2d42", "#c8ccd4", "#ffffff"
KINDS = {"tokens": "#d7e8f4", "dense": "#e9e9ee", "experts": "#d9efdf"}
CELL = 26


class Picture:
    """An SVG that grows."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="Helvetica, Arial, sans-serif"><title>{escape(title)}</title>',
            f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = GRID) -> None:
        self._lines.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{fill}" stroke="{stroke}"/>'
        )

    def text(
        self, x: float, y: float, words: str, *, size: int = 14, anchor: str = "middle", bold: bool = False
    ) -> None:
        style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{"bold" if bold else "normal"}"'
        self._lines.append(f'<text x="{x}" y="{y}" {style} fill="{INK}">{escape(words)}</text>')

    def save(self, name: str) -> None:
        (IMAGES / f"{name}.svg").write_text("\n".join([*self._lines, "</svg>"]) + "\n", encoding="utf-8")


ROWS = (0, 2, 0, 1, 3, 1)
"""Whose token each row is, expert by expert."""


def vector(picture: Picture, x: float, y: float, tokens: Sequence[int], name: str) -> None:
    for i, token in enumerate(tokens):
        picture.box(x, y + i * CELL, 58, CELL - 3, TOKENS[token], PAPER)
    picture.text(x + 29, y - 9, name, bold=True)


def matrix(picture: Picture, x: float, y: float, *, transposed: bool, name: str) -> None:
    """P [rows, tokens], or its transpose."""
    for i, row_token in enumerate(ROWS):
        for token, color in enumerate(TOKENS):
            across, down = (i, token) if transposed else (token, i)
            fill = color if token == row_token else "#f6f6f8"
            picture.box(x + across * CELL, y + down * CELL, CELL - 3, CELL - 3, fill)
    picture.text(x + (6 if transposed else 4) * CELL / 2, y - 9, name, bold=True)


def draw_dispatch(picture: Picture, left: float) -> None:
    left, top = left + 30, 92
    picture.text(left + 155, 40, "dispatch:  rows = P x", size=18, bold=True)
    vector(picture, left + 20, top, ROWS, "rows")
    picture.text(left + 95, top + 3 * CELL, "=", size=22)
    matrix(picture, left + 112, top, transposed=False, name="P")
    vector(picture, left + 232, top + CELL, range(4), "x")


def draw_combine(picture: Picture, left: float) -> None:
    top = 92
    picture.text(left + 180, 40, "combine:  y = Pᵀ diag(w) rows", size=18, bold=True)
    vector(picture, left + 20, top + CELL, range(4), "y")
    picture.text(left + 95, top + 3 * CELL, "=", size=22)
    matrix(picture, left + 112, top + CELL, transposed=True, name="Pᵀ diag(w)")
    vector(picture, left + 285, top, ROWS, "rows")


def draw_map() -> None:
    """Dispatch is P x, combine is its transpose with weights: side by side, and each alone."""
    title = "a route is a sparse linear map"
    both = Picture(740, 270, title)
    draw_dispatch(both, 0)
    draw_combine(both, 365)
    both.save("map")
    for name, draw in (("dispatch", draw_dispatch), ("combine", draw_combine)):
        alone = Picture(370, 270, f"{name}: {title}")
        draw(alone, 0)
        alone.save(name)


Rank = tuple[str, Sequence[tuple[str, str]]]


def draw_layout(name: str, title: str, ranks: Sequence[Rank], note: str) -> None:
    """ranks: (heading, [(kind, words)]), two beside each other: as wide as a phone."""
    width, line = 188, 40
    box = 34 + line * max(len(parts) for _, parts in ranks)
    titles = textwrap.wrap(title.replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}"), 44)
    notes = textwrap.wrap(note, 56)
    top = 20 + 22 * len(titles)
    bottom = top + (box + 12) * ((len(ranks) + 1) // 2)
    picture = Picture(40 + 2 * width - 18, bottom + 10 + 19 * len(notes), title)
    for i, words in enumerate(titles):
        picture.text(20, 30 + 22 * i, words, size=16, anchor="start", bold=True)
    for i, (heading, parts) in enumerate(ranks):
        x, y = 20 + i % 2 * width, top + (box + 12) * (i // 2)
        picture.box(x, y, width - 18, box, "#fafafa", INK)
        picture.text(x + (width - 18) / 2, y + 20, heading, bold=True)
        for j, (kind, words) in enumerate(parts):
            picture.box(x + 8, y + 30 + j * line, width - 34, line - 8, KINDS[kind])
            picture.text(x + (width - 18) / 2, y + 51 + j * line, words, size=13)
    for i, words in enumerate(notes):
        picture.text(20, bottom + 10 + 19 * i, words, size=13, anchor="start")
    picture.save(name)


def experts(first: int, more: str = "") -> tuple[str, str]:
    return "experts", f"experts {first} to {first + 3}{more}"


def draw_layouts() -> None:
    own, dense = ("tokens", "tokens of its own"), ("dense", "router, shared experts")
    draw_layout(
        "ep",
        "Expert parallel: ep = 2",
        [(f"rank {r}", [own, dense, experts(4 * r)]) for r in range(2)],
        "A token travels once to each rank that owns one of its experts.",
    )
    cut = ("dense", "1/4 of dense weights")
    draw_layout(
        "ep_fsdp",
        "Expert parallel and FSDP2: efsdp = 2, ep = 2, dense parameters over dp = 4",
        [(f"rank {r}", [own, cut, experts(4 * (r % 2), f", half {r // 2 + 1}")]) for r in range(4)],
        "Tokens travel within {0, 1} and within {2, 3}; expert weights are gathered within {0, 2} and {1, 3}.",
    )
    draw_layout(
        "etp",
        "Expert tensor parallel: ep = 2, etp = 2",
        [(f"rank {r}", [own, dense, experts(4 * (r // 2), f", F half {r % 2 + 1}")]) for r in range(4)],
        "Each expert's F is cut over {0, 1} and over {2, 3}; rows are gathered there, and outputs summed.",
    )
    parts = ("first half", "second half")
    draw_layout(
        "tp_replicated",
        "Tensor parallel, tokens replicated: tp = ep = 2",
        [
            (f"rank {r}", [("tokens", "the same batch"), ("tokens", f"routes the {parts[r]}"), dense, experts(4 * r)])
            for r in range(2)
        ],
        "Each rank routes its share of the positions; the outputs of all are gathered.",
    )
    draw_layout(
        "tp_sharded",
        "Tokens sharded: sequence or context parallel",
        [(f"rank {r}", [("tokens", "positions of each"), dense, experts(4 * r)]) for r in range(2)],
        "Each rank holds positions of every sequence, any number of them; none is legal.",
    )


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    draw_map()
    draw_layouts()
