"""Documents become blocks of exactly `seq_len` tokens, dealt out to the data-parallel ranks.

All ranks read the same stream and each keeps its own blocks, so the global batch of a step does not depend on how
many ranks share it, and no rank can run dry before another. Blocks are mixed, so that a batch is not one document.
Memory holds one piece of a document and MIXED_TOKENS tokens, however long the data.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from trimtab.errors import InputError
from trimtab.train.chat import IGNORED, Piece, encode_chat
from trimtab.train.sources import Document, documents, mix

PIECE_CHARS = 1 << 18
LINE_CHARS = 1 << 16
MIXED_TOKENS = 1 << 18
DRY_BLOCKS = 10_000


def pack(pieces: Iterable[Piece], seq_len: int) -> Iterator[Piece]:
    """Cut a stream of pieces into blocks of `seq_len` tokens: order kept, nothing lost but the last, short rest."""
    ids: list[int] = []
    labels: list[int] = []
    for more_ids, more_labels in pieces:
        ids += more_ids
        labels += more_labels
        start = 0
        while len(ids) - start >= seq_len:
            yield ids[start : start + seq_len], labels[start : start + seq_len]
            start += seq_len
        del ids[:start], labels[:start]


@dataclass(frozen=True)
class TokenStream:
    """The endless stream of labelled tokens of some files: epoch after epoch, documents separated by EOS.

    Args:
        files: what `find_files` gave.
        tokenizer: a Hugging Face tokenizer with an EOS token.
        seed: decides the order of the documents.
    """

    files: Sequence[Path]
    tokenizer: Any
    seed: int

    def __iter__(self) -> Iterator[Piece]:
        if self.tokenizer.eos_token_id is None:
            raise InputError("the model's tokenizer has no EOS token to separate documents with")
        for epoch in itertools.count():
            targets = 0
            for document in documents(self.files, self.seed, epoch):
                for ids, labels in self._encode(document):
                    targets += len(labels) - labels.count(IGNORED)
                    yield ids, labels
            if not targets:
                raise InputError(
                    f"the data is empty: no text, and no turn of the role `assistant`, in {len(self.files)} file(s), "
                    f"{self.files[0]} …"
                )

    def _encode(self, document: Document) -> Iterator[Piece]:
        eos = self.tokenizer.eos_token_id
        if document.line is None:
            yield from self._encode_text(_read(document.path))
            return
        record = document.record()
        if "messages" not in record:
            # JSON can spell lone surrogates, which no tokenizer takes.
            yield from self._encode_text([record["text"].encode("utf-8", "replace").decode()])
            return
        for ids, labels in encode_chat(self.tokenizer, record["messages"], document.place, record.get("tools")):
            yield (ids, labels) if ids[-1:] == [eos] else ([*ids, eos], [*labels, IGNORED])

    def _encode_text(self, texts: Iterable[str]) -> Iterator[Piece]:
        eos = self.tokenizer.eos_token_id
        opening = [i for i in self.tokenizer("")["input_ids"] if i != eos]  # BOS, where the tokenizer adds one
        empty = True
        for text in filter(None, texts):
            ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            if ids and empty:
                ids, empty = opening + ids, False
            yield ids, ids
        if not empty:
            yield [eos], [eos]


def _read(path: Path) -> Iterator[str]:
    """A text file in pieces of about PIECE_CHARS characters that end at a line's end where lines are sane."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            while piece := file.read(PIECE_CHARS):
                yield piece + file.readline(LINE_CHARS)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


class RankBlocks(IterableDataset[dict[str, torch.Tensor]]):
    """This data-parallel rank's blocks of a stream, as `input_ids` and `labels` of shape [seq_len], int64.

    Global batch s consists of blocks s * size * batch … of which rank r holds the r-th run of `batch` blocks.
    Blocks without a single target are left out on all ranks alike.

    Args:
        stream: pieces, the same on every rank.
        seq_len: tokens per block.
        batch: sequences per data-parallel rank and forward pass.
        rank, size: this rank's place among the data-parallel ranks.
        seed: decides how blocks are mixed.
        mixed: tokens that are held to mix blocks.
        skip: blocks of this rank that are left out at the beginning, for a run that goes on.
    """

    def __init__(
        self,
        stream: Iterable[Piece],
        *,
        seq_len: int,
        batch: int,
        rank: int,
        size: int,
        seed: int,
        mixed: int = MIXED_TOKENS,
        skip: int = 0,
    ) -> None:
        self.stream, self.seq_len, self.batch = stream, seq_len, batch
        self.rank, self.size, self.seed, self.mixed = rank, size, seed, mixed
        self.skip = skip

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        rng = random.Random(self.seed)
        mixed = mix(self._blocks(), rng, items=max(1, self.mixed // self.seq_len))
        mine = (block for index, block in enumerate(mixed) if index // self.batch % self.size == self.rank)
        for block in itertools.islice(mine, self.skip, None):
            yield {"input_ids": block[0].long(), "labels": block[1].long()}

    def _blocks(self) -> Iterator[torch.Tensor]:
        """Blocks that hold a target, as [2, seq_len] (ids, labels), int32."""
        dry = 0
        for ids, labels in pack(self.stream, self.seq_len):
            if any(label != IGNORED for label in labels[1:]):  # the first position predicts nothing
                dry = 0
                yield torch.tensor([ids, labels], dtype=torch.int32)
            else:
                dry += 1
                if dry == DRY_BLOCKS:
                    raise InputError(f"{dry} blocks of {self.seq_len} tokens in a row hold no assistant's token")
