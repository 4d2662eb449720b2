"""Prepared blocks become batches: every rank maps their files into its memory, and the order follows from the seed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from trimtab.errors import InputError

INDEX = "index.json"


def turns(weights: Sequence[float]) -> Iterator[int]:
    """Yield the group of each block: after any number of blocks, each group has its share as near as can be."""
    taken = [0] * len(weights)
    for number in itertools.count(1):
        group = max(range(len(weights)), key=lambda n: weights[n] * number - taken[n])
        taken[group] += 1
        yield group


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Prepared blocks, mapped into memory: `input_ids`, `labels` and, where conversations share blocks,
    `position_ids`, of shape [seq_len], int64; `real` is False where a block is only filled up. held_out: the share of
    each group's blocks, by `seed`, that is set apart: with `evaluated` those, else the rest."""

    def __init__(self, folder: Path, *, held_out: float = 0.0, seed: int = 0, evaluated: bool = False) -> None:
        held = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        self.packed, self.weights, self.summaries = (held[key] for key in ("packed", "weights", "summaries"))
        self._maps, self._orders = [], []
        for n, size in enumerate(held["blocks"]):
            self._maps.append(np.memmap(folder / f"{n}.blocks", np.int32, "r", shape=(size, 3, held["seq_len"])))
            cut = max(1, round(size * held_out)) if held_out else 0
            if held_out and cut >= size:
                raise InputError(f"{size} block(s) of {held['seq_len']} tokens are too few to hold some of them out")
            order = np.random.default_rng([seed, n]).permutation(size) if held_out else np.arange(size)
            self._orders.append(order[:cut] if evaluated else order[cut:])
        self.sizes = list(map(len, self._orders))

    def __len__(self) -> int:
        return sum(self.sizes)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        for group, size in enumerate(self.sizes):
            if 0 <= index < size:
                return self.of(group, index)
            index -= size
        raise IndexError(index)

    def of(self, group: int, index: int) -> dict[str, torch.Tensor]:
        """One block of a group."""
        ids, labels, positions = torch.from_numpy(self._maps[group][self._orders[group][index]].astype(np.int64))
        block = {"input_ids": ids, "labels": labels, "real": positions >= 0}
        return block | {"position_ids": positions.where(positions >= 0, ~positions)} if self.packed else block


class RankBlocks(IterableDataset[dict[str, torch.Tensor]]):
    """This data-parallel rank's blocks, endlessly: each group's in a new order, by `seed`, in each of its epochs.

    Global batch s consists of blocks s * size * batch …, of which rank r of `size` holds the r-th run of `batch`
    blocks. skip: blocks of this rank that are left out at the beginning, for a run that goes on.
    """

    def __init__(self, blocks: Blocks, *, batch: int, rank: int, size: int, seed: int, skip: int = 0) -> None:
        self.blocks, self.batch, self.rank, self.size, self.seed, self.skip = blocks, batch, rank, size, seed, skip

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        sizes, taken = self.blocks.sizes, [0] * len(self.blocks.sizes)
        orders: dict[int, tuple[int, Any]] = {}
        for number, group in enumerate(turns(self.blocks.weights)):
            epoch, place = divmod(taken[group], sizes[group])
            taken[group] += 1
            step, turn = divmod(number // self.batch, self.size)
            if turn != self.rank or step * self.batch + number % self.batch < self.skip:
                continue
            if group not in orders or orders[group][0] != epoch:
                orders[group] = epoch, np.random.default_rng([self.seed, epoch, group]).permutation(sizes[group])
            yield self.blocks.of(group, int(orders[group][1][place]))
