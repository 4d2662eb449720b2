"""What the project wants to show: bars, and the cases that each speaks of. `benchmarks.judged` judges them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.finding import Finding
from benchmarks.subject import BOTH, FORWARD

FINE = ([512, 256, 64, 8], [1024, 512, 32, 4])
COARSE = ([1024, 2816, 8, 2],)
LARGE = (2048, 8192)

Quantity = Literal["speed-up", "x limit", "mean speed-up"]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """asked: the least speed-up or the largest multiple of the limit."""

    where: str
    quantity: Quantity
    asked: float
    applies: Callable[[Finding], bool]


def _layer(
    *, dtype: str = "", mode: str = "", shapes: Sequence[list[int]] = (), tokens: Sequence[int] = (),
    kernels: str = "auto", many_ranks: bool = False, in_place: bool | None = False,
) -> Callable[[Finding], bool]:  # fmt: skip
    """Findings of the balanced layer with these; empty means any."""

    def applies(f: Finding) -> bool:
        c = f.case
        return (
            f.record.part == "layer"
            and f.group == "balanced"
            and f.name.split()[1] == kernels
            and (c["ranks"] > 1) == many_ranks
            and dtype in ("", c["dtype"])
            and mode in ("", f.mode)
            and (not shapes or list(c["shape"]) in shapes)
            and (not tokens or c["tokens"] in tokens)
            and in_place in (None, bool(c["in_place"]))
        )

    return applies


def _exchange(f: Finding) -> bool:
    return f.record.part == "exchange" and f.case["tokens"] == 8192


BARS = (
    Bar(where="bf16, forward+backward, 2,048 and 8,192 tokens, A and B", quantity="speed-up", asked=2.5,
        applies=_layer(dtype="bf16", mode=BOTH, shapes=FINE, tokens=LARGE)),
    Bar(where="bf16, forward+backward, 2,048 and 8,192 tokens, A and B", quantity="x limit", asked=1.5,
        applies=_layer(dtype="bf16", mode=BOTH, shapes=FINE, tokens=LARGE)),
    Bar(where="bf16, forward+backward, 2,048 and 8,192 tokens, C", quantity="speed-up", asked=1.3,
        applies=_layer(dtype="bf16", mode=BOTH, shapes=COARSE, tokens=LARGE)),
    Bar(where="bf16, forward+backward, 2,048 and 8,192 tokens, C", quantity="x limit", asked=1.4,
        applies=_layer(dtype="bf16", mode=BOTH, shapes=COARSE, tokens=LARGE)),
    Bar(where="bf16, forward, 2,048 and 8,192 tokens, A and B", quantity="speed-up", asked=3.0,
        applies=_layer(dtype="bf16", mode=FORWARD, shapes=FINE, tokens=LARGE)),
    Bar(where="bf16, forward, 2,048 and 8,192 tokens, C", quantity="speed-up", asked=1.5,
        applies=_layer(dtype="bf16", mode=FORWARD, shapes=COARSE, tokens=LARGE)),
    Bar(where="bf16, forward, 2,048 and 8,192 tokens, A, B and C", quantity="x limit", asked=1.4,
        applies=_layer(dtype="bf16", mode=FORWARD, tokens=LARGE)),
    Bar(where="forward+backward, 256 tokens", quantity="speed-up", asked=1.3,
        applies=_layer(mode=BOTH, tokens=(256,))),
    Bar(where="forward+backward, 256 tokens, gradients in place", quantity="speed-up", asked=1.8,
        applies=_layer(mode=BOTH, tokens=(256,), in_place=True)),
    Bar(where="fp32, forward+backward, 2,048 and 8,192 tokens", quantity="x limit", asked=1.3,
        applies=_layer(dtype="fp32", mode=BOTH, tokens=LARGE)),
    Bar(where="fp32, any pass, any size: never slower", quantity="speed-up", asked=1.0,
        applies=_layer(dtype="fp32", in_place=None)),
    Bar(where="stock PyTorch alone, bf16, forward+backward, 2,048 and 8,192 tokens", quantity="mean speed-up",
        asked=1.4, applies=_layer(dtype="bf16", mode=BOTH, tokens=LARGE, kernels="loop")),
    Bar(where="stock PyTorch alone, bf16, any pass, any size: never slower", quantity="speed-up", asked=1.0,
        applies=_layer(dtype="bf16", kernels="loop")),
    Bar(where="2 and 4 ranks, forward+backward, A and B", quantity="speed-up", asked=2.0,
        applies=_layer(mode=BOTH, shapes=FINE, many_ranks=True)),
    Bar(where="2 and 4 ranks, forward+backward, C", quantity="speed-up", asked=1.4,
        applies=_layer(mode=BOTH, shapes=COARSE, many_ranks=True)),
    Bar(where="dispatch + combine, 8,192 tokens, over raw all-to-all and a copy", quantity="x limit", asked=1.25,
        applies=_exchange),
)  # fmt: skip
