"""Records become blocks of exactly `seq_len` tokens, once and before the first step.

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

from trimtab.errors import InputError
from trimtab.train.assistant_spans import IGNORED, Piece, encode_chat
from trimtab.train.dataset import INDEX, turns
from trimtab.train.readers import Record, read_records
from trimtab.train.report import DataReport
from trimtab.train.sources import Group

WINDOW_TOKENS = 1 << 23
"""Tokens of the conversations that are packed at a time, which memory holds."""

Document = np.ndarray[Any, np.dtype[np.int32]]
"""Token ids and labels, [2, length]."""


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
        for ids in map(self._ids, filter(None, pieces)):
            yield ids if began else self.opening + ids
            began = True
        if began:
            yield [self.eos]

    def pieces(self, record: Record) -> Iterator[Piece]:
        """Encode a conversation, or a prompt with its completion, labeled where the model is to learn."""
        if record.messages is not None:
            yield from encode_chat(self.tokenizer, record.messages, record.place, record.tools)
            return
        ids = [*self.opening, *self._ids("".join([record.prompt or "", *record.text])), self.eos]
        before = self.opening + self._ids(record.prompt or "")
        start = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, ids, strict=False))))
        yield ids, [IGNORED] * start + ids[start:]  # a token across the border is learned

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


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
                report.see(record)
                if record.kind != "text":
                    self._add(list(encoder.pieces(record)), record, report, writer)
                elif enough():
                    report.of(record).left_out["beyond the steps of the run"] += 1
                else:
                    length = 0
                    for ids in encoder.text(record.text):
                        report.samples.setdefault("text", (record.place, (ids[:256], ids[:256])))
                        writer.text(ids)
                        length += len(ids)
                    report.of(record).add(length, length)
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
            whole = np.array(piece, np.int32)
            whole[1, 0] = IGNORED  # nothing comes before it
            document = whole[:, : self.seq_len]
            learned, cut = int((document[1] != IGNORED).sum()), whole.shape[1] > self.seq_len
            if cut and self.too_long == "drop":
                tally.left_out[f"longer than {self.seq_len} tokens"] += 1
            elif not learned:
                tally.left_out[f"without a token to learn among its first {self.seq_len}"] += 1
            else:
                report.samples.setdefault(record.kind, (record.place, piece))
                tally.add(whole.shape[1], learned)
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
