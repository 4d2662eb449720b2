"""What the fuzz draws: small worlds of traffic, each a value that can be printed, pasted back and made smaller.

Case i of a seed is drawn from (seed, i) alone, and its shape from (seed, i // BLOCK): the cases of one block have the
same shape, so that they can run side by side in one world, each on tokens and experts of its own.

Legend: P ranks, K experts per token, e experts per rank, T tokens of the case, L positions of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from random import Random

from trimtab.dispatch.options import CombineMode
from trimtab.layout import ALIGNMENTS

BLOCK = 64
"""Cases that share a shape."""
PATTERNS = ("any", "one_expert", "one_rank", "cold_rank", "dropped", "all_dropped", "duplicates", "hot_expert")
PLANS = ("exact", "counted", "static", "static_counted")
TRANSPORTS = ("direct", "gathered", "none")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What all cases of a block have in common.

    plan: "exact" sizes, or "static" bounds; "counted" where the number of kept slots is handed on.
    transport: "direct" row by row, "gathered" through the real `AllGather`, "none" where one rank has all experts.
    lengths: positions of a sequence on each rank, where tokens are shards of sequences; else None.
    poisoned: whether fresh memory holds NaN.
    """

    ranks: int = 1
    experts: int = 1
    top_k: int = 1
    width: int = 1
    dtype: str = "float64"
    combine: CombineMode = "sum"
    alignment: int = 1
    plan: str = "exact"
    transport: str = "direct"
    lengths: tuple[int, ...] | None = None
    poisoned: bool = False


@dataclass(frozen=True, kw_only=True)
class Case:
    """One world of traffic.

    holder: [T] the rank that holds each token, rising; of sharded sequences it follows from `shape.lengths`.
    ids, weights: [T][K] global expert ids (-1 dropped) and whole-numbered weights.
    real: [T] False for a masked token.
    Tokens of sharded sequences are in the order (sequence, position).
    """

    shape: Shape
    holder: tuple[int, ...]
    ids: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[int, ...], ...]
    real: tuple[bool, ...]

    def describe(self) -> str:
        """Python that makes the case again: `eval` of it equals the case."""
        shape = ", ".join(
            f"{f.name}={getattr(self.shape, f.name)!r}"
            for f in fields(Shape)
            if getattr(self.shape, f.name) != f.default
        )
        own = ",\n  ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(Case) if f.name != "shape")
        return f"Case(\n  shape=Shape({shape}),\n  {own})"


def holders(lengths: tuple[int, ...], sequences: int) -> tuple[int, ...]:
    """The rank of each (sequence, position)."""
    return tuple(rank for rank, length in enumerate(lengths) for _ in range(length)) * sequences


@dataclass(frozen=True, kw_only=True)
class Habits:
    """How the traffic of a block falls: shared, so that a rank or expert can be cold in all of it.

    table: [256] a random byte to an expert id (int8).
    duplicates: whether all slots of a token name the same expert.
    silent: ranks without a token.
    """

    table: bytes
    duplicates: bool
    silent: frozenset[int]
    masked: bool


def draw_shape(seed: int, block: int) -> tuple[Shape, Habits]:
    """The shape and habits of a block."""
    rng = Random(f"trimtab {seed} shape {block}")
    sharded = block % 4 == 1  # by turns, so that a short run has some
    ranks = rng.choice((2, 2, 2, 2, 3, 3, 3, 4, 4, 5, 6, 7, 8) if sharded else (1, 1, 2, 2, 2, 2, 3, 3, 4, 5, 6, 7, 8))
    experts = rng.choice((1, 1, 2, 2, 3, 4))
    lengths = tuple(rng.choice((0, 1, 1, 2, 3)) for _ in range(ranks)) if sharded else None
    silent = frozenset(rank for rank in range(ranks) if rng.random() < 0.15)
    shape = Shape(
        ranks=ranks,
        experts=experts,
        top_k=rng.choice((1, 2, 2, 3, 4, 8)),
        width=rng.choice((1, 2, 3, 5)),
        dtype=rng.choice(("float64", "float32", "bfloat16")),
        combine=rng.choice(("sum", "sum", "ordered")),
        alignment=rng.choice((1, 1, *ALIGNMENTS)),
        plan=rng.choice(PLANS),
        transport=rng.choice(TRANSPORTS[:2] if ranks > 1 else TRANSPORTS),
        lengths=lengths,
        poisoned=rng.random() < 0.5,
    )
    pattern = rng.choice((*PATTERNS, "any", "any"))
    habits = Habits(
        table=_table(shape, pattern, rng.randrange(ranks * experts)),
        duplicates=pattern == "duplicates",
        silent=silent if rng.random() < 0.97 else frozenset(range(ranks)),
        masked=rng.random() < 0.3,
    )
    return shape, habits


def draw_case(shape: Shape, habits: Habits, seed: int, index: int) -> Case:
    """Case `index` of `seed`, whose block has this shape and these habits."""
    rng = Random(f"trimtab {seed} case {index}")
    if shape.lengths is None:
        sizes = [0 if rank in habits.silent else rng.choice((0, 1, 1, 2, 3, 5)) for rank in range(shape.ranks)]
        holder = tuple(rank for rank, size in enumerate(sizes) for _ in range(size))
    else:
        holder = holders(shape.lengths, rng.choice((0, 1, 2, 3)))
    tokens, slots = len(holder), len(holder) * shape.top_k
    drawn = list(memoryview(rng.randbytes(slots).translate(habits.table)).cast("b"))
    if habits.duplicates:
        drawn = [first for first in drawn[:: shape.top_k] for _ in range(shape.top_k)]
    high = 3 if shape.dtype == "bfloat16" else 4
    weights = [byte % high - 1 for byte in rng.randbytes(slots)]
    real = tuple(byte > 80 for byte in rng.randbytes(tokens)) if habits.masked else (True,) * tokens
    return Case(shape=shape, holder=holder, ids=_rows(drawn, shape), weights=_rows(weights, shape), real=real)


def worlds_of(seed: int, block: int) -> list[list[Case]]:
    """The cases of a block as they run: the first in a world of its own, the others side by side."""
    shape, habits = draw_shape(seed, block)
    cases = [draw_case(shape, habits, seed, block * BLOCK + i) for i in range(BLOCK)]
    return [cases[:1], cases[1:]]


def case_of(seed: int, index: int) -> Case:
    """Case `index` of `seed`."""
    return draw_case(*draw_shape(seed, index // BLOCK), seed, index)


def _rows(values: list[int], shape: Shape) -> tuple[tuple[int, ...], ...]:
    return tuple(zip(*[iter(values)] * shape.top_k, strict=True))


def _table(shape: Shape, pattern: str, target: int) -> bytes:
    """A random byte to an expert id; `target` is the expert that a pattern singles out, its rank the rank."""
    everyone = list(range(shape.ranks * shape.experts))
    mine = [i for i in everyone if i // shape.experts == target // shape.experts]
    others = [i for i in everyone if i not in mine]
    choices = {
        "one_expert": [target],
        "one_rank": mine,
        "cold_rank": others or [-1],
        "dropped": [*everyone, *[-1] * len(everyone)],
        "all_dropped": [-1],
        "hot_expert": [*everyone, *[target] * 4 * len(everyone)],
    }.get(pattern, everyone)
    return bytes(choices[byte % len(choices)] & 255 for byte in range(256))
