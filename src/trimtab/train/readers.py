"""Files as records: a text, a conversation, or a prompt with its completion, each with its file and line.

`datasets` reads tables. It does not read JSON here: it would not say on which line a record lies, and turns rows of
several shapes into strings of JSON.
"""

from __future__ import annotations

import codecs
import io
import itertools
import json
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trimtab.errors import InputError, TrimtabError, first_line
from trimtab.extras import required
from trimtab.train.messages import NO_ANSWER, cleaned, decoded, read_messages

LINES = (".jsonl", ".ndjson")
TABLES = {".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
"""Suffixes that `datasets` reads, with the builder for each."""
COMPRESSED = (".gz", ".zst")
SNIFF_BYTES = 4096
PIECE_CHARS = 1 << 16
EXPECTED = "`text`, `messages`, `conversations`, or `prompt` and `completion`"
_RECORD = re.compile(rb'\s*\[?\s*\{[^{}\[\]]*"(text|messages|conversations|prompt|completion)"\s*:')


@dataclass(frozen=True, slots=True)
class Record:
    """One document: a conversation (`messages`, `tools`), a completion (`text` after `prompt`) or a plain text.

    place: file, and line or row. text: in pieces. odd: how often, in words, something is not read or not as it stands;
    known once the text is read.
    """

    path: Path
    place: str
    text: Iterable[str] = ()
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    odd: Counter[str] = field(default_factory=Counter)

    @property
    def kind(self) -> str:
        """The word for it in a report."""
        return "conversation" if self.messages is not None else "text" if self.prompt is None else "completion"


def kind_of(path: Path) -> str:
    """The suffix that decides how a file is read, compression aside."""
    return Path(path.stem).suffix.lower() if path.suffix in COMPRESSED else path.suffix.lower()


def is_records(path: Path) -> bool:
    """True for a file of records; any other is one text."""
    kind = kind_of(path)
    return kind in (*LINES, *TABLES) or (kind == ".json" and _RECORD.match(head_of(path)) is not None)


def head_of(path: Path) -> bytes:
    """A file's first bytes, decompressed."""
    with opened(path) as file:
        return bytes(file.read(SNIFF_BYTES))


def read_records(files: Sequence[Path], seed: int, enough: Callable[[], bool]) -> Iterator[Record]:
    """Yield all records of `files` once, the files in an order that `seed` decides. enough: asked after each plain text
    of a table; once it holds, the rest of that table is not read. Raises InputError for the first malformed record."""
    order = list(files)
    random.Random(f"{seed}/0").shuffle(order)
    for path in order:
        if not is_records(path):
            whole = Record(path, str(path))
            yield replace(whole, text=_read_text(path, whole.odd))
            continue
        table = kind_of(path) in TABLES
        for place, row in _rows(path) if table else _objects(path):
            record = _record(row, path, place)
            reached = not (table and record.kind == "text" and enough())
            record.odd.update([] if reached else ["table(s) with rows that the steps of the run do not reach"])
            yield record
            if not reached:
                break


def _objects(path: Path) -> Iterator[tuple[str, Any]]:
    array = kind_of(path) == ".json" and head_of(path).lstrip().startswith(b"[")
    with opened(path) as file:
        if array:  # memory holds all of it
            for number, row in enumerate(_parsed(file.read(), str(path), "an array"), start=1):
                yield f"{path}: row {number}", row
            return
        for number, line in enumerate(file, start=1):
            if line.strip():
                place = f"{path}:{number}"
                row = _parsed(line.removeprefix(codecs.BOM_UTF8), place, "one object per line")
                del line  # it may be long
                yield place, row


def _parsed(text: bytes, place: str, expected: str) -> Any:
    try:
        return json.loads(text.decode())
    except UnicodeDecodeError:
        raise InputError(f"{place} is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place} is not JSON ({error}); expected {expected}") from None


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    datasets = required("datasets", f"{path}: a table", "train")
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    kind = kind_of(path)
    options = {"keep_default_na": False} if kind == ".csv" else {}  # else "NA" and empty texts would be None
    with tempfile.TemporaryDirectory(prefix="trimtab-") as locks, _naming(path):
        found = datasets.load_dataset(
            TABLES[kind], data_files=[str(path)], split="train", streaming=True, cache_dir=locks, **options
        )
        for number, row in enumerate(found, start=1):
            yield f"{path}: row {number}", _without_none(row)


def _without_none(value: Any) -> Any:
    """One schema holds the keys of all rows: those that a row lacks come back as None."""
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a file's bytes, decompressed. Raises InputError where it cannot be read, or not to its end."""
    with _naming(path):
        if path.suffix in COMPRESSED:
            # Its readers, unlike others, say where a stream ends early.
            pyarrow = required("pyarrow", f"{path}: a compressed file", "train")
            with pyarrow.input_stream(str(path), compression="detect") as file:
                yield io.BufferedReader(file)
        else:
            with path.open("rb") as file:
                yield file


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Whatever pandas, pyarrow or a decompressor raises becomes an InputError that names the file."""
    try:
        yield
    except TrimtabError:
        raise
    except Exception as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or first_line(error)})") from None


def in_pieces(chunks: Iterable[str]) -> Iterator[str]:
    """A text in pieces of about a chunk that end at a line's end or before a space, where there are such: there hardly
    a tokenizer joins."""
    held = ""
    for chunk in chunks:
        if held:
            cut = held.rfind("\n") + 1 or max(held.rfind(" "), 0) or len(held)
            yield held[:cut]
            held = held[cut:]
        held += chunk
    if held:
        yield held


def chunks_of(text: str) -> Iterator[str]:
    """A text in chunks: pieces of it, and no list of all its tokens, lie in memory at a time."""
    return (text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS))


def tokens(tokenizer: Any, text: str, borders: list[int]) -> Iterator[tuple[int, int, int]]:
    """Each token's id, and where it begins and ends in `text`, at least between which of the borders."""
    for start, end in [(0, len(text))] if tokenizer.is_fast else itertools.pairwise([0, *borders]):
        at = start
        for n, piece in enumerate(in_pieces(chunks_of(text[start:end]))):
            ids, places = encoded(tokenizer, piece, later=n > 0)
            both = zip(ids, places or [(0, end - at)] * len(ids), strict=True)
            yield from ((i, at + a, at + b) for i, (a, b) in both)
            at += len(piece) if tokenizer.is_fast else 0


def encoded(tokenizer: Any, piece: str, *, later: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids and, of a fast tokenizer, their places. A later piece lacks the space that Llama-2's begins a text with."""

    def of(text: str) -> tuple[list[int], list[tuple[int, int]]]:
        made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
        return list(made["input_ids"]), made["offset_mapping"] if tokenizer.is_fast else []

    if later and of("a")[0] != of("\na")[0][(size := len(line := of("\n")[0])) :]:
        ids, places = of(f"\n{piece}")
        if ids[:size] == line:
            return ids[size:], [(a - 1, b - 1) for a, b in places[size:]]
    return of(piece)


def _read_text(path: Path, odd: Counter[str]) -> Iterator[str]:
    with opened(path) as binary:
        file = io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape")
        yield from in_pieces(cleaned(chunk, odd) for chunk in iter(lambda: file.read(PIECE_CHARS), ""))


def _record(row: Any, path: Path, place: str) -> Record:
    if not isinstance(row, dict):
        raise InputError(f"{place} has a {type(row).__name__}; expected an object with {EXPECTED}")
    has, made = {key for key, value in row.items() if value is not None}, Record(path, place)
    if name := next((name for name in ("messages", "conversations") if name in has), None):
        read, made = {name, "tools"}, replace(made, messages=read_messages(row[name], place, name, made.odd))
    elif {"prompt", "completion"} <= has:
        read, made = {"prompt", "completion"}, _answered(row, made)
    elif "text" in row:
        read, made = {"text"}, replace(made, text=_string(row["text"], made, "text"))
    else:
        raise InputError(f"{place} has the keys {sorted(map(str, row))}; expected {EXPECTED}")
    if made.messages is not None:
        read, made = read | {"tools"}, replace(made, tools=_tools(row, place))
    made.odd.update(f"record(s) with the column `{key}`, not read" for key in row.keys() - read)
    return made


def _answered(row: dict[str, Any], made: Record) -> Record:
    """A prompt and its completion: two strings, or two lists of messages of which the second is learned."""
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str):
        asked = "".join(_string(prompt, made, "prompt"))
        return replace(made, prompt=asked, text=_string(completion, made, "completion"))
    odd = Counter[str]()
    messages = [{**each, "train": False} for each in read_messages(prompt, made.place, "prompt", odd)]
    made.odd.update({key: times for key, times in odd.items() if key != NO_ANSWER})
    return replace(made, messages=messages + read_messages(completion, made.place, "completion", made.odd))


def _string(value: Any, made: Record, name: str) -> Iterable[str]:
    if not isinstance(value, str):
        raise InputError(f"{made.place} has a `{name}` of the type {type(value).__name__}; expected a string")
    return in_pieces(cleaned(chunk, made.odd) for chunk in chunks_of(value))


def _tools(row: dict[str, Any], place: str) -> list[Any] | None:
    tools = decoded(row.get("tools") or None, place, "tools")
    if tools is not None and not isinstance(tools, list):
        raise InputError(f"{place}: `tools` must be a list")
    return [decoded(tool, place, "tools") for tool in tools] if tools else None
