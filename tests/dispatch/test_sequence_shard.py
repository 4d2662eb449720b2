"""Sequence shards on real ranks: B > 1, lengths that do not divide, fewer positions than ranks, no sequences."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from helpers.ranks import run_ranks
from trimtab.dispatch.sequence_shard import join_shards, shard, take_shard, unshard
from trimtab.layout import shard_cuts

SHAPES = [(*lead, length, 2) for lead in ((), (0,), (1,), (3,), (2, 2)) for length in (0, 1, 3, 8, 17)]


def shards_on_rank() -> None:
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    for *lead, length, width in SHAPES:
        full = torch.arange(torch.Size((*lead, length, width)).numel(), dtype=torch.float64)
        full = full.view(*lead, length, width).requires_grad_()
        mine = shard(full, group)
        cuts = shard_cuts(length, ranks)
        assert torch.equal(mine, full[..., cuts[rank] : cuts[rank + 1], :]), "wrong rows"
        back = unshard(mine * (rank + 1), length, group)
        owner = torch.cat([torch.full((end - start, 1), r + 1.0) for r, (start, end) in enumerate(pairwise(cuts))])
        torch.testing.assert_close(back, full.detach() * owner, rtol=0, atol=0)
        dy = torch.randn(full.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        (grad,) = torch.autograd.grad(back, full, dy)
        torch.testing.assert_close(grad, dy * owner, rtol=0, atol=0)
    uneven = (0, *(rank + 1 for rank in range(ranks - 1)), ranks + 3)
    full = torch.arange(2.0 * uneven[-1]).view(2, -1, 1)
    assert torch.equal(join_shards(take_shard(full, uneven, rank), uneven, group), full)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_put_each_token_on_its_row_and_bring_gradients_back(ranks: int) -> None:
    run_ranks(shards_on_rank, ranks)
