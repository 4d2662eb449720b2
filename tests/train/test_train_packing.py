"""Documents to blocks to ranks: nothing lost, order kept, memory bounded, every rank its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.errors import InputError
from trimtab.train import packing
from trimtab.train.chat import IGNORED, Piece
from trimtab.train.packing import RankBlocks, TokenStream, pack
from trimtab.train.sources import find_files
from trimtab.train.tokens import byte_tokenizer

EOS = 256


@given(st.lists(st.integers(0, 40)), st.integers(1, 30))
def test_packing_loses_nothing_and_keeps_the_order(lengths: list[int], seq_len: int) -> None:
    tokens = iter(range(10**6))
    pieces = [(ids, [-i for i in ids]) for n in lengths if (ids := list(itertools.islice(tokens, n))) is not None]
    drawn = 0

    def stream() -> Iterator[Piece]:
        nonlocal drawn
        for piece in pieces:
            drawn += len(piece[0])
            yield piece

    packed: list[int] = []
    for ids, labels in pack(stream(), seq_len):
        assert len(ids) == seq_len
        assert labels == [-i for i in ids]
        packed += ids
        # Held at any time: less than a block and the piece being cut.
        assert drawn - len(packed) < seq_len + max(lengths)
    total = sum(lengths)
    assert packed == list(range(total - total % seq_len))


def endless(start: int = 0) -> Iterator[Piece]:
    for i in itertools.count(start):
        yield [i] * 7, [i] * 7


@given(st.integers(1, 4), st.integers(1, 4))
def test_ranks_share_one_global_batch(size: int, batch: int) -> None:
    steps = 3

    def blocks(batch: int, rank: int, size: int) -> list[tuple[int, ...]]:
        rows = RankBlocks(endless(), seq_len=5, batch=batch, rank=rank, size=size, seed=3, mixed=50)
        return [tuple(row["input_ids"].tolist()) for row in itertools.islice(rows, batch * steps)]

    alone = blocks(batch * size, 0, 1)
    shares = [blocks(batch, rank, size) for rank in range(size)]
    for step in range(steps):
        together = [row for share in shares for row in share[step * batch : (step + 1) * batch]]
        assert together == alone[step * batch * size : (step + 1) * batch * size]


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 30))
def test_a_run_that_goes_on_reads_what_is_left(batch: int, size: int, skip: int) -> None:
    def blocks(rank: int, skip: int, count: int) -> list[int]:
        stream = (([i] * 2, [i] * 2) for i in itertools.count())
        rows = RankBlocks(stream, seq_len=2, batch=batch, rank=rank, size=size, seed=3, mixed=20, skip=skip)
        return [int(row["input_ids"][0]) for row in itertools.islice(rows, count)]

    for rank in range(size):
        assert blocks(rank, skip, 10) == blocks(rank, 0, skip + 10)[skip:]


def test_blocks_without_targets_are_left_out() -> None:
    def stream() -> Iterator[Piece]:
        for i in itertools.count():
            yield [i] * 4, [i if i % 3 == 0 else IGNORED] * 4

    rows = itertools.islice(RankBlocks(stream(), seq_len=4, batch=1, rank=0, size=1, seed=0, mixed=20), 50)
    assert all(row["input_ids"][0] % 3 == 0 for row in rows)


def test_endless_blocks_without_targets_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "DRY_BLOCKS", 10)
    stream = itertools.repeat(([1] * 4, [IGNORED] * 4))
    with pytest.raises(InputError, match="assistant"):
        next(iter(RankBlocks(stream, seq_len=4, batch=1, rank=0, size=1, seed=0, mixed=20)))


def read(stream: TokenStream, pieces: int) -> list[int]:
    return [i for ids, _ in itertools.islice(stream, pieces) for i in ids]


def test_text_and_records_are_separated_by_eos_and_repeat(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\nzwö")
    (tmp_path / "b.jsonl").write_text('{"text": "three \\ud800"}\n{"text": ""}\n')
    stream = TokenStream(find_files([str(tmp_path)]).files, byte_tokenizer(), seed=0)
    documents = bytes(i % EOS for i in read(stream, 8)).split(b"\0")
    assert sorted(documents[:4]) == sorted([b"one\nzw\xc3\xb6", b"three ?"] * 2)


def test_a_long_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PIECE_CHARS", 100)
    text = "".join(f"line {i}\n" for i in range(200))
    (tmp_path / "a.txt").write_text(text)
    stream = TokenStream([tmp_path / "a.txt"], byte_tokenizer(), seed=0)
    pieces = list(itertools.takewhile(lambda piece: piece[0] != [EOS], stream))
    assert max(len(ids) for ids, _ in pieces) < 120
    assert b"".join(bytes(ids) for ids, _ in pieces) == text.encode()


def test_conversations_carry_their_labels(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    ids, labels = next(iter(TokenStream([path], byte_tokenizer(), seed=0)))
    assert ids[-1] == EOS
    assert labels[-1] == IGNORED
    assert [i for i in labels if i != IGNORED] == [ord("b"), 258]


def test_data_without_an_answer_or_an_eos_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    with pytest.raises(InputError, match="empty"):
        next(iter(TokenStream([path], byte_tokenizer(), seed=0)))
    tokenizer: Any = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(InputError, match="EOS"):
        next(iter(TokenStream([path], tokenizer, seed=0)))
