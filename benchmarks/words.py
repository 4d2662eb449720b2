"""A case in a few words, for pages, pictures and bars."""

from __future__ import annotations

from benchmarks.layer_case import SHAPES
from benchmarks.result import Record


def case_words(record: Record) -> str:
    """As in "B, bf16, 2048 tokens, 1 thread"; ranks where there are several."""
    c, names = record.case, {shape: name for name, shape in SHAPES.items()}
    words = [names.get(tuple(c["shape"]), ",".join(map(str, c["shape"])))] if "shape" in c else [str(c.get("preset"))]
    words += [str(c[name]) for name in ("family", "dtype") if name in c]
    for name in ("tokens", "threads", "ranks"):
        if name in c and (name != "ranks" or c[name] > 1):
            words.append(f"{c[name]} {name if c[name] != 1 else name.removesuffix('s')}")
    return ", ".join([*words, *(["in place"] if c.get("in_place") else [])])
