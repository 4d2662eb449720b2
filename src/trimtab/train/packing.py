"""Records become blocks of exactly `seq_len` tokens, once and before the first step, and blocks become batches: every
rank maps their files into its memory, and their order follows from the seed.

Conversations are packed whole, the best fitting ones together; positions begin anew with each, and so no token sees
another conversation. Texts are joined by EOS and cut where a block is full.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from trimtab.errors import InputError
from trimtab.train.assistant_spans import IGNORED, Piece, encode_chat, first_of
from trimtab.train.readers import Record, encoded, read_records, tokens
from trimtab.train.report import DataReport
from trimtab.train.sources import Group

INDEX = "index.json"
WINDOW_TOKENS = 1 << 23
"""Tokens of the conversations that are packed at a time, which memory holds."""

Document = np.ndarray[Any, np.dtype[np.int32]]
"""Token ids and labels, [2, length]."""


def turns(weights: Sequence[float]) -> Iterator[int]:
    """Yield the group of each block: after any number of blocks, each group has its share as near as can be."""
    taken = [0] * len(weights)
    for number in itertools.count(1):
        group = max(range(len(weights)), key=lambda n: weights[n] * number - taken[n])
        taken[group] += 1
        yield group


class Encoder:
    """Turns records into tokens and labels. Raises InputError for a tokenizer without an EOS token."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.eos = tokenizer, tokenizer.eos_token_id
        if self.eos is None:
            raise InputError("the model's tokenizer has no EOS token to separate documents with")
        self.opening = [i for i in tokenizer("")["input_ids"] if i != self.eos]  # BOS, where the tokenizer adds one

    def text(self, pieces: Iterable[str]) -> Iterator[list[int]]:
        """Encode a plain text piece by piece, then EOS; nothing for an empty one."""
        began = False
        for piece in filter(None, pieces):
            ids, _ = encoded(self.tokenizer, piece, later=began)
            yield ids if began else self.opening + ids
            began = True
        if began:
            yield [self.eos]

    def pieces(self, record: Record, most: int) -> Iterator[Piece]:
        """Encode a conversation, or a prompt with its completion, labeled where the model is to learn."""
        if record.messages is not None:
            yield from encode_chat(self.tokenizer, record.messages, record.place, record.tools, most)
            return
        asked, answered = record.prompt or "", "".join(record.text)
        if not answered.strip():
            return
        whole, border = asked + answered, len(asked)
        labeled = (  # a token across the border is learned
            (i, i if end > border else IGNORED) for i, _, end in tokens(self.tokenizer, whole, [border, len(whole)])
        )
        before = ((i, IGNORED) for i in self.opening)
        yield first_of(itertools.chain(before, labeled, [(self.eos, self.eos)]), most)


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Put items into bins, the longest first, each where it leaves the least room. Returns the bins' items by index."""
    bins: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # room that is left and its bin, sorted
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect.bisect_left(spaces, (lengths[item], 0))
        if at == len(spaces):
            bins.append([])
        space, n = spaces.pop(at) if at < len(spaces) else (room, len(bins) - 1)
        bins[n].append(item)
        if space > lengths[item]:
            bisect.insort(spaces, (space - lengths[item], n))
    return bins


class _Writer:
    """Appends blocks to a file, as [3, seq_len] of int32: token ids, labels and positions."""

    def __init__(self, file: Any, seq_len: int, packed: bool) -> None:
        self.file, self.seq_len, self.packed = file, seq_len, packed
        self.texts = self.chats = self._held = 0
        self._rest: list[int] = []
        self._window: list[Document] = []

    def text(self, ids: list[int]) -> None:
        self._rest += ids
        full = len(self._rest) // self.seq_len * self.seq_len
        for block in np.array(self._rest[:full], np.int32).reshape(-1, self.seq_len):
            self._write([np.stack([block, block])])
        self.texts += full // self.seq_len
        del self._rest[:full]

    def document(self, document: Document) -> None:
        self._window.append(document)
        self._held += document.shape[1]
        if self._held >= WINDOW_TOKENS:
            self._pack()

    def close(self) -> None:
        self._pack()
        if len(self._rest) > 1:
            self._write([np.array([self._rest, self._rest], np.int32)])
            self.texts += 1

    def _pack(self) -> None:
        lengths = [document.shape[1] for document in self._window]
        bins = best_fit(lengths, self.seq_len) if self.packed else [[n] for n in range(len(lengths))]
        for items in bins:
            self._write([self._window[n] for n in items])
        self.chats += len(bins)
        self._window, self._held = [], 0

    def _write(self, documents: list[Document]) -> None:
        """Write documents and, where they end early, their own tokens once more, without labels, their positions as
        complements: tokens of padding would all go to the same experts."""
        missing = self.seq_len - sum(document.shape[1] for document in documents)
        if missing:
            again = np.resize(np.concatenate(documents, 1)[0], missing)
            documents = [*documents, np.stack([again, np.full_like(again, IGNORED)])]
        positions = np.concatenate([np.arange(document.shape[1], dtype=np.int32) for document in documents])
        positions[self.seq_len - missing :] = ~positions[self.seq_len - missing :]
        self.file.write(np.concatenate(documents, 1).tobytes() + positions.tobytes())


@dataclass(frozen=True)
class Packer:
    """Turns records into blocks of `seq_len` tokens. packed: True where several conversations share a block. too_long:
    "truncate" what is longer than a block from the right, or "drop" it."""

    tokenizer: Any
    seq_len: int
    seed: int
    packed: bool = True
    too_long: str = "truncate"

    def write(self, group: Group, path: Path, most: int | None) -> DataReport:
        """Read and check all of a group and write its blocks: of plain text at most `most`, if that is all it holds."""
        from tqdm import tqdm

        report, encoder = DataReport(group.unread), Encoder(self.tokenizer)
        with path.open("wb") as file:
            writer = _Writer(file, self.seq_len, self.packed)
            enough: Callable[[], bool] = lambda: most is not None and writer.texts >= most  # noqa: E731
            found = read_records(group.files, self.seed, enough)
            for record in tqdm(found, desc="reading data", unit=" records", delay=2, leave=False, disable=None):
                if record.kind != "text":
                    self._add(list(encoder.pieces(record, self.seq_len)), record, report, writer)
                elif enough():
                    report.of(record).left_out["beyond the steps of the run"] += 1
                else:
                    length = 0
                    for ids in encoder.text(record.text):
                        report.samples.setdefault("text", (record.place, (ids[:256], ids[:256])))
                        writer.text(ids)
                        length += len(ids)
                    report.of(record).add(length, length)
                report.see(record)
            writer.close()
        if enough() and writer.chats:  # a mixture: the share of texts in it is that of all of them
            return self.write(group, path, None)
        report.blocks = writer.texts + writer.chats
        return report

    def _add(self, pieces: list[Piece], record: Record, report: DataReport, writer: _Writer) -> None:
        tally = report.of(record)
        if not pieces:
            tally.left_out["without an answer to learn"] += 1
        for piece in pieces:
            document = np.array(piece[:2], np.int32)
            document[1, 0] = IGNORED  # nothing comes before it
            learned, cut = int((document[1] != IGNORED).sum()), piece[2] > self.seq_len
            if cut and self.too_long == "drop":
                tally.left_out[f"longer than {self.seq_len} tokens"] += 1
            elif not learned:
                tally.left_out[f"without a token to learn among its first {self.seq_len}"] += 1
            else:
                report.samples.setdefault(record.kind, (record.place, document.tolist()))
                tally.add(piece[2], learned)
                tally.truncated += cut
                writer.document(document)


def prepare_data(groups: Sequence[Group], packer: Packer, folder: Path, draws: int | None) -> list[DataReport]:
    """Write the blocks of all groups, and an index of them, to a folder, which is made anew; `Blocks` opens it.

    draws: blocks that a run takes; plain text is read only as far as they reach. None: all. Raises InputError for the
    first record that is malformed or that the chat template refuses, and where a group has nothing to learn from.
    """
    weights = [group.weight for group in groups]
    taken = Counter(itertools.islice(turns(weights), draws)) if draws is not None else None
    reports = []
    folder.mkdir(parents=True)
    for n, group in enumerate(groups):
        report = packer.write(group, folder / f"{n}.blocks", max(1, taken[n]) if taken else None)
        if not report.blocks:
            found = f"{len(group.files)} file(s), {group.files[0]} …"
            raise InputError(f"the data is empty, {found}: {report.summary()}")
        reports.append(report)
    held = {"seq_len": packer.seq_len, "packed": packer.packed, "weights": weights}
    held |= {"blocks": [each.blocks for each in reports], "summaries": [each.summary() for each in reports]}
    (folder / INDEX).write_text(json.dumps(held), encoding="utf-8")
    return reports


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
