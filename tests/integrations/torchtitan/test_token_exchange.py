"""torchtitan's protocol without torchtitan: called as its layer calls, against the oracle, however the tokens fall."""

from __future__ import annotations

import gc
import io
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from helpers.cases import PATTERNS, case
from helpers.comparing import assert_close
from helpers.ranks import run_ranks
from helpers.routed import D, E, K, Share, run, truth
from trimtab.dispatch.all_to_all import AllToAll
from trimtab.dispatch.options import ExchangeOptions
from trimtab.dispatch.transports import transport_over
from trimtab.errors import ConfigError, InputError
from trimtab.integrations.torchtitan import TokenExchange

FALLS = [pattern for pattern in PATTERNS if pattern != "masked"]
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}


def share_of(pattern: str, rank: int, ranks: int, dtype: torch.dtype) -> Share:
    x, ids, w, _ = case(pattern, rank, ranks, E, K, D, dtype, seed=len(pattern))
    g = torch.Generator().manual_seed(99 + rank)
    return Share(x=x, scores=w, ids=ids, dy=torch.randn(x.shape, generator=g, dtype=torch.float64).to(dtype))


def every_fall(dtype: torch.dtype, pad_multiple: int, combine: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    exchange = TokenExchange(E, K, pad_multiple=pad_multiple, options=ExchangeOptions(combine=combine))
    if ranks > 1:
        exchange.wire(AllToAll(dist.group.WORLD), "MoE 0")
    for pattern in FALLS:
        shares = [share_of(pattern, r, ranks, dtype) for r in range(ranks)]
        true = truth(shares, rank)
        for name, value in run(exchange, shares[rank], rank, ranks).items():
            assert value.dtype == (dtype if name != "dscores" else torch.promote_types(dtype, torch.float32))
            assert_close(value, true[name], BOUNDS[dtype], f"{pattern} {name}")


@pytest.mark.parametrize(
    ("ranks", "dtype", "pad_multiple", "combine"),
    [
        (1, torch.float64, 1, "sum"), (1, torch.float32, 16, "ordered"), (2, torch.float64, 8, "ordered"),
        (2, torch.float32, 1, "sum"), (2, torch.bfloat16, 16, "sum"),
        pytest.param(4, torch.float64, 1, "sum", marks=pytest.mark.xdist_group("ranks4")),
        pytest.param(4, torch.float32, 32, "ordered", marks=pytest.mark.xdist_group("ranks4")),
    ],
    ids=str,
)  # fmt: skip
def test_equals_the_oracle(ranks: int, dtype: torch.dtype, pad_multiple: int, combine: str) -> None:
    run_ranks(every_fall, ranks, dtype, pad_multiple, combine)


def sequence_shards(lengths: tuple[int, ...], batch: int) -> None:
    """Positions of every sequence, cut over the ranks; the truth knows nothing of the cut."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    cuts = (0, *accumulate(lengths))
    g = torch.Generator().manual_seed(5)
    total = batch * cuts[-1]
    x, dy = (torch.randn(total, D, generator=g, dtype=torch.float64) for _ in range(2))
    ids = torch.rand(total, E, generator=g).argsort(1)[:, :K]
    w = torch.rand(total, K, generator=g, dtype=torch.float64)
    mine = torch.arange(total).view(batch, -1)[:, cuts[rank] : cuts[rank + 1]].flatten()
    exchange = TokenExchange(E, K)
    exchange.wire(AllToAll(dist.group.WORLD), "MoE 0")
    got = run(exchange, Share(x[mine], w[mine], ids[mine], dy[mine]), rank, ranks)
    whole = truth([Share(x, w, ids, dy)], 0)
    cut = slice(rank * (E // ranks), (rank + 1) * (E // ranks))
    for name, value in got.items():
        assert_close(value, whole[name][cut if name in ("dup", "ddown") else mine], 1e-12, name)


@pytest.mark.parametrize(("lengths", "batch"), [((4, 4), 3), ((5, 2), 3), ((3, 0), 2)])
def test_sequence_shards_of_a_batch_come_back_in_place(lengths: tuple[int, ...], batch: int) -> None:
    run_ranks(sequence_shards, len(lengths), lengths, batch)


def test_groups_lie_as_torchtitan_lays_them() -> None:
    """By expert, within one in token order; padded to the multiple with zeros, which are counted."""
    x = torch.arange(1.0, 6.0)[:, None].expand(5, D).contiguous()
    ids = torch.tensor([[2], [0], [2], [0], [0]])
    rows, counts, _ = TokenExchange(4, 1).dispatch(x, torch.ones(5, 1), ids, torch.tensor([3, 0, 2, 0]))
    assert counts.tolist() == [3, 0, 2, 0]
    assert rows[:, 0].tolist() == [2, 4, 5, 1, 3]
    rows, counts, _ = TokenExchange(4, 1, pad_multiple=8).dispatch(x, torch.ones(5, 1), ids, torch.zeros(4))
    assert counts.tolist() == [8, 0, 8, 0]
    assert rows[:, 0].tolist() == [2, 4, 5, 0, 0, 0, 0, 0, 1, 3, 0, 0, 0, 0, 0, 0]


def test_scores_are_not_rounded_to_the_tokens_dtype() -> None:
    """Products and a token's sum in float32, rounded once."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(40, D, generator=g).bfloat16()
    scores, ids = torch.rand(40, K, generator=g), torch.rand(40, E, generator=g).argsort(1)[:, :K]
    exchange = TokenExchange(E, K)
    rows, _, sent = exchange.dispatch(x, scores, ids)
    y = exchange.combine(rows, sent, x)
    exact = (x.double()[:, None] * scores.double()[..., None]).sum(1)
    assert int((y != exact.bfloat16()).sum()) <= 0.01 * y.numel()  # float32 may fall on the other side of a tie


def unlike_tokens() -> str:
    """Rank 1 hands its combine other tokens than its dispatch; both ranks must hear of it."""
    exchange = TokenExchange(E, K)
    exchange.wire(AllToAll(dist.group.WORLD), "MoE 0")
    share = share_of("random", dist.get_rank(), 2, torch.float32)
    rows, _, sent = exchange.dispatch(share.x, share.scores, share.ids)
    try:
        exchange.combine(rows, sent, share.x[: 11 - dist.get_rank()])
    except InputError as error:
        return str(error)
    return "no error"


def test_other_tokens_than_dispatched_are_refused_on_every_rank() -> None:
    first, second = run_ranks(unlike_tokens, 2)
    assert "rank 1" in first
    assert "tokens (10, 16)" in second


def test_padding_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not one of"):
        TokenExchange(E, K, pad_multiple=3)


def layers_of_two_models() -> tuple[bool, bool, int]:
    """The second is wired when the first is gone, or is not: the collector of each rank decides that for itself. A
    DTensor over the mesh can be saved."""
    mesh, other = (DeviceMesh("cpu", [0, 1], mesh_dim_names=("ep",)) for _ in range(2))
    first, number = id(transport_over(mesh, "alltoall")), transport_over(mesh, "alltoall").guard.layers
    gc.collect()
    again, elsewhere = transport_over(mesh, "alltoall"), transport_over(other, "alltoall")
    torch.save(distribute_tensor(torch.ones(2), mesh, [Shard(0)]), io.BytesIO())
    return id(again) == first, elsewhere is not again, number


def test_a_mesh_keeps_its_transport() -> None:
    assert run_ranks(layers_of_two_models, 2) == [(True, True, 0)] * 2
