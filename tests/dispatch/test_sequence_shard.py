"""Sequence shards on real ranks: B > 1, lengths that do not divide, fewer positions than ranks, any shard sizes."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
import torch.distributed as dist

from helpers.ranks import run_ranks
from trimtab.dispatch.sequence_shard import shard, unshard
from trimtab.errors import InputError
from trimtab.layout import SequenceLayout

LAYOUTS = [(b, length) for b in (0, 1, 3) for length in (0, 1, 3, 8, 17)]


def shards_on_rank() -> None:
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    layouts = [SequenceLayout.even(b, length, ranks) for b, length in LAYOUTS]
    layouts += [SequenceLayout(batch=2, cuts=(0, *accumulate((7 * r + 3) % 5 for r in range(ranks))))]
    for layout in layouts:
        tokens = layout.batch * layout.length
        full = torch.arange(tokens * 2, dtype=torch.float64).view(tokens, 2).requires_grad_()
        mine = shard(full, layout, group)
        all_BL = torch.arange(tokens).view(layout.batch, layout.length)
        places = [all_BL[:, a:b].flatten().tolist() for a, b in pairwise(layout.cuts)]
        expected = places[rank]
        assert mine.shape == (len(expected), 2)
        assert (mine[:, 0] / 2).tolist() == expected, "wrong rows"
        back = unshard(mine * (rank + 1), layout, group)
        owner = torch.zeros(tokens, dtype=torch.float64)
        for r, tokens_of_r in enumerate(places):
            owner[tokens_of_r] = r + 1
        torch.testing.assert_close(back, full.detach() * owner[:, None], rtol=0, atol=0)
        dy = torch.randn(tokens, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        (grad,) = torch.autograd.grad(back, full, dy)
        torch.testing.assert_close(grad, dy * owner[:, None], rtol=0, atol=0)
    with pytest.raises(InputError, match="5 tokens"):
        shard(torch.zeros(5, 2), SequenceLayout.even(1, 4, ranks), group)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_put_each_token_on_its_row_and_bring_gradients_back(ranks: int) -> None:
    run_ranks(shards_on_rank, ranks)
