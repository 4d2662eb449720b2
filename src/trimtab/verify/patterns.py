"""How tokens fall: the columns of the ledger. Each pattern makes one problem for any topology.

Choices become logits through the first E columns of x, see `make_weights`.

Legend: B sequences, L positions, N = B * L tokens of a data-parallel rank, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from trimtab.layout import shard_cuts
from trimtab.verify.topologies import Topology
from trimtab.verify.truth import DOCUMENTS, Batch, Problem, Sizes

Length = Callable[[Topology, int, int], int]
"""(topology, data-parallel rank, rank in its tp group) -> positions."""
Choose = Callable[[Topology, int, int, torch.Generator], Tensor]
"""(topology, N, K, generator) -> [N, K] expert ids."""

GARBAGE = 8192.0
"""What masked tokens hold."""


def _even(length: int) -> Length:
    def of(t: Topology, d: int, i: int) -> int:
        cuts = shard_cuts(length, t.tp)
        return cuts[i + 1] - cuts[i]

    return of


SIX = _even(6)


def _ragged(t: Topology, d: int, i: int) -> int:
    return 2 + (5 * d + 3 * i) % 7


def _drawn(odds: Callable[[int], Tensor]) -> Choose:
    """K distinct experts per token. odds: of E experts."""

    def choose(t: Topology, n: int, k: int, g: torch.Generator) -> Tensor:
        noise = -torch.rand(n, t.num_experts, generator=g).clamp_min(1e-9).log() / odds(t.num_experts)
        return noise.argsort(1)[:, :k]

    return choose


_draw = _drawn(torch.ones)


def _balanced(t: Topology, n: int, k: int, g: torch.Generator) -> Tensor:
    first = torch.arange(n)[:, None] * k + torch.arange(k)
    return (first + int(torch.randint(t.num_experts, (1,), generator=g))) % t.num_experts


def _on_rank(rank: int) -> Choose:
    """All slots on one rank's experts: an expert may be chosen twice, so the choice is replayed."""

    def choose(t: Topology, n: int, k: int, g: torch.Generator) -> Tensor:
        e = t.num_experts // t.ep
        return rank % t.ep * e + torch.randint(e, (n, k), generator=g)

    return choose


def _cold_rank(t: Topology, n: int, k: int, g: torch.Generator) -> Tensor:
    """The last rank's experts get nothing (the last expert, where one rank owns all)."""
    cold = t.num_experts // t.ep if t.ep > 1 else 1
    return _drawn(lambda e: torch.where(torch.arange(e) < e - cold, 1.0, 1e-6))(t, n, k, g)


def _zipf(power: float) -> Choose:
    return _drawn(lambda e: torch.arange(1, e + 1) ** -power)


def _same_rank(t: Topology, n: int, k: int, g: torch.Generator) -> Tensor:
    """The first two choices are the two experts 2j and 2j + 1 of one rank."""
    pair = torch.randint(t.num_experts // 2, (n, 1), generator=g)
    rest = _draw(t, n, k, g)
    both = torch.cat((2 * pair + 1, 2 * pair, rest), 1)
    keep = torch.ones_like(both, dtype=torch.bool)
    keep[:, 2:] = rest.div(2, rounding_mode="floor") != pair
    order = keep.logical_not().long().argsort(dim=1, stable=True)
    return both.gather(1, order)[:, :k]


def _dropped(t: Topology, n: int, k: int, g: torch.Generator) -> Tensor:
    return _draw(t, n, k, g).masked_fill(torch.rand(n, k, generator=g) < 0.5, -1)


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """One way for tokens to fall: `batch` sequences of `length` positions, and the experts that `choose` gives them.

    spoil: "nan" or "id", a bad value that the layer must refuse. odd: D is odd, so that no row but every eighth begins
    at a multiple of 16 bytes; for NF4 it is another width.
    """

    name: str
    says: str
    batch: int = 2
    length: Length = SIX
    choose: Choose = _draw
    masked: float = 0.0
    replayed: bool = False
    ties: bool = False
    top_k: Callable[[int], int] = lambda experts: 2 if experts <= 4 else 3
    layers: int = 1
    odd: bool = False
    spoil: str = ""

    def __reduce__(self) -> tuple[Callable[[str], Pattern], tuple[str]]:
        return pattern_named, (self.name,)  # functions made here can't be sent to another process; a name can


PATTERNS: tuple[Pattern, ...] = (
    Pattern(name="random", says="experts drawn evenly"),
    Pattern(name="balanced", says="every expert gets the same", choose=_balanced),
    Pattern(name="one_expert", says="one expert is everybody's first choice",
            choose=_drawn(lambda e: torch.where(torch.arange(e) < e - 1, 1.0, 1e6))),
    Pattern(name="one_rank", says="all slots on the first rank", choose=_on_rank(0), replayed=True),
    Pattern(name="lone_rank", says="ragged, all but the last rank get none", choose=_on_rank(-1), length=_ragged,
            replayed=True),
    Pattern(name="cold_rank", says="one rank gets none", choose=_cold_rank),
    Pattern(name="empty_source", says="a rank with zero tokens",
            length=lambda t, d, i: 0 if (d, i) == (t.dp - 1, t.tp - 1) else 4),
    Pattern(name="empty_world", says="no token anywhere", length=_even(0)),
    Pattern(name="all_masked", says="every token is padding", masked=1.0),
    Pattern(name="masked", says="half of the tokens are padding that holds garbage, odd D", masked=0.5, odd=True),
    Pattern(name="one_token", says="one token in the world", batch=1, length=lambda t, d, i: int(d == i == 0)),
    Pattern(name="zipf1", says="expert j drawn with odds 1 / j", choose=_zipf(1.0)),
    Pattern(name="zipf2", says="expert j drawn with odds 1 / j^2, odd D", choose=_zipf(2.0), odd=True),
    Pattern(name="top1", says="K = 1", top_k=lambda experts: 1),
    Pattern(name="top_all", says="K = E", top_k=lambda experts: experts),
    Pattern(name="same_rank", says="two choices on one rank", choose=_same_rank),
    Pattern(name="ties", says="exact ties: the lower expert id goes first", ties=True),
    Pattern(name="dropped", says="half of the slots dropped, odd D", choose=_dropped, replayed=True, odd=True),
    Pattern(name="all_dropped", says="every slot dropped", replayed=True,
            choose=lambda t, n, k, g: torch.full((n, k), -1)),
    Pattern(name="duplicates", says="a token chooses one expert K times", replayed=True,
            choose=lambda t, n, k, g: _draw(t, n, 1, g).expand(n, k).contiguous()),
    Pattern(name="uneven_shards", says="shards of 4, 3, 2, 1 positions", length=lambda t, d, i: 4 - (i + d) % 4),
    Pattern(name="batched", says="three sequences whose length does not divide", batch=3, length=_even(7)),
    Pattern(name="short", says="fewer positions than ranks that share them", batch=1,
            length=lambda t, d, i: int(i < max(1, t.tp - 1))),
    Pattern(name="prime", says="prime counts", batch=1, length=_even(13)),
    Pattern(name="ragged", says="every rank another number of tokens", length=_ragged),
    Pattern(name="replayed", says="ids handed in, scores live", replayed=True),
    Pattern(name="alternating", says="two layers, another rank cold in each", choose=_cold_rank, layers=2),
    Pattern(name="nan_logits", says="a NaN logit on one rank of each expert group must raise on all", spoil="nan"),
    Pattern(name="bad_id", says="an expert id out of range must raise on all", spoil="id", replayed=True),
)  # fmt: skip


def pattern_named(name: str) -> Pattern:
    """The pattern of that name."""
    return next(pattern for pattern in PATTERNS if pattern.name == name)


def make_problem(topology: Topology, pattern: Pattern, dtype: torch.dtype, seed: int) -> Problem:
    """The same on every rank: all randomness comes from `seed`."""
    g = torch.Generator().manual_seed(seed)
    top_k = pattern.top_k(topology.num_experts)
    sizes = Sizes.of(topology, top_k=top_k, layers=pattern.layers, dtype=dtype, odd=pattern.odd)
    batches = tuple(_make_batch(topology, pattern, sizes, d, g) for d in range(topology.dp))
    return Problem(sizes=sizes, batches=batches, raises=bool(pattern.spoil), cp=topology.cp)


def _make_batch(t: Topology, pattern: Pattern, sizes: Sizes, d: int, g: torch.Generator) -> Batch:
    batch, cuts = pattern.batch, (0, *accumulate(pattern.length(t, d, i) for i in range(t.tp)))
    n, e = batch * cuts[-1], sizes.num_experts
    if pattern.ties:
        ranked = torch.randint(2, (n, e), generator=g).double()
        ids = ranked.argsort(dim=1, descending=True, stable=True)[:, : sizes.top_k]
    else:
        ids = pattern.choose(t, n, sizes.top_k, g)
        ranked = _ranked(ids.clamp_min(0), e, g)
    x = torch.randn(n, sizes.dim, generator=g, dtype=torch.float64)
    # Multiples of 1/16 below 4, times a power of two: exact in bfloat16, and never closer than a sixteenth.
    x[:, :e] = ranked / 8 * 2.0 ** torch.randint(-1, 2, (n, 1), generator=g)
    dy = torch.randn(n, sizes.dim, generator=g, dtype=torch.float64)
    x, dy = (v.to(sizes.dtype).double().view(batch, cuts[-1], sizes.dim) for v in (x, dy))
    ids = ids.view(batch, cuts[-1], sizes.top_k)
    mask = None
    if pattern.masked:
        mask = torch.rand(batch, cuts[-1], generator=g) >= pattern.masked
        x[~mask] = GARBAGE
    documents = None
    if t.packed != "none":  # of ranks that share rows each has some of any; along a row they come one after another
        documents = torch.randint(DOCUMENTS, (batch, cuts[-1]), generator=g).sort(1).values
    # At rank 0 of each expert group, where it is in the tp group of this data-parallel rank.
    spoiled = [cuts[i] for i in range(t.tp) if pattern.spoil and (d * t.tp + i) % t.ep == 0]
    if pattern.spoil == "nan":
        x[0, spoiled, 0] = float("nan")
    else:
        ids[0, spoiled, 0] = e + 3
    return Batch(
        x_BLD=x, dy_BLD=dy, ids_BLK=ids, mask_BL=mask, replayed=pattern.replayed, cuts=cuts, documents_BL=documents
    )  # fmt: skip


def _ranked(ids_NK: Tensor, experts: int, g: torch.Generator) -> Tensor:
    """[N, E] distinct integers 0..E-1 per token, highest at the chosen experts, in their order."""
    priority = torch.rand(ids_NK.shape[0], experts, generator=g)
    bonus = torch.arange(ids_NK.shape[1], 0, -1, dtype=priority.dtype).expand(ids_NK.shape)
    return priority.scatter_reduce(1, ids_NK, bonus, "amax").argsort(1).argsort(1).double()
