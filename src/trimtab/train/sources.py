"""Files become a stream of raw documents, in an order that depends on the seed alone.

Two kinds of file: JSON lines (one document a line, `text` or `messages`) and anything else that is text (one
document a file). Files are shuffled by name, then documents pass through a buffer of bounded size that mixes
them: memory holds the list of file names and one buffer, never the data.
"""

from __future__ import annotations

import codecs
import json
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trimtab.errors import InputError
from trimtab.train.chat import check_chat
from trimtab.train.report import LOGS, RUN

JSON_LINES = (".jsonl", ".ndjson")
SNIFF_BYTES = 4096
NUL = "it holds NUL bytes"
BUFFER_DOCUMENTS = 1024
BUFFER_CHARS = 16 << 20

T = TypeVar("T")


@dataclass(frozen=True)
class Document:
    """One document: a whole text file (`line` is None, read lazily) or one line of a JSON lines file."""

    path: Path
    line: str | None = None
    number: int = 0

    @property
    def place(self) -> str:
        """Where the document lies, as `file` or `file:line`."""
        return str(self.path) if self.line is None else f"{self.path}:{self.number}"

    def record(self) -> dict[str, Any]:
        """Parse a JSON line. Raises InputError unless it is an object with `messages` or a string `text`."""
        try:
            record = json.loads(self.line or "")
        except (ValueError, RecursionError) as error:
            raise InputError(f"{self.place} is not JSON ({error}); expected one object per line") from None
        if not isinstance(record, dict) or not ("messages" in record or isinstance(record.get("text"), str)):
            if not isinstance(record, dict):
                has = f"a {type(record).__name__}"
            elif "text" in record:
                has = f"a `text` of the type {type(record['text']).__name__}"
            else:
                has = f"the keys {sorted(record)}"
            raise InputError(f"{self.place} has {has}; expected a string `text` or a list `messages`")
        return record

    def check(self, tokenizer: Any) -> int:
        """How many bytes a line has. Raise InputError for one that is no record, or not UTF-8 and so loses letters."""
        try:
            size = len((self.line or "").encode())
        except UnicodeEncodeError:  # a surrogate stands for each byte that says nothing
            raise InputError(f"{self.place} is not UTF-8 text") from None
        record = self.record()
        if "messages" in record:
            check_chat(tokenizer, record["messages"], record.get("tools"), self.place)
        return size


def standard_library() -> list[Path]:
    """The source files of the running Python's standard library: the default training text."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return sorted(p for p in root.rglob("*.py") if not skipped.intersection(p.relative_to(root).parts))


@dataclass(frozen=True)
class Found:
    """The data's files, sorted, and those left out that may be text, but not in UTF-8."""

    files: list[Path]
    left_out: list[Path]

    def __str__(self) -> str:
        """What is left out, in brackets; empty where nothing is."""
        return f" ({len(self.left_out)} left out that are not UTF-8, as {self.left_out[0]})" if self.left_out else ""


def find_files(paths: Sequence[str]) -> Found:
    """List the data files under `paths` (the standard library when none is given).

    A directory gives every text file below it that is not hidden and that no run of `trimtab train` left there, UTF-8
    by its beginning (bytes further on that are not become U+FFFD); a .json file there is plain text, as in any source
    tree, but named by itself it is refused, for it is likely meant as records.

    Raises InputError for a path that does not exist, cannot be read or is not text, and when no file is left.
    """
    if not paths:
        return Found(standard_library(), [])
    found = Found([], [])
    for name in paths:
        path = Path(name)
        if path.is_dir():
            for each in _below(path):
                why = _why_no_text(each)
                if why != NUL:
                    (found.left_out if why else found.files).append(each)
        elif not path.exists():
            raise InputError(f"--data {name}: no such file or directory")
        elif not path.is_file():
            raise InputError(f"--data {name}: neither a file nor a folder; what comes through a pipe is read once only")
        elif path.suffix == ".json":
            raise InputError(f"--data {name}: a .json file; write one object per line and name it .jsonl")
        elif why := _why_no_text(path):
            raise InputError(f"--data {name}: not a text file in UTF-8 ({why})")
        else:
            found.files.append(path)
    if not found.files:
        raise InputError(f"--data {' '.join(paths)}: no text file found there{found}")
    return found


def check_documents(files: Sequence[Path], seed: int) -> None:
    """Look for the first document with anything in it. Raises InputError if it is malformed or there is none."""
    for document in documents(files, seed, epoch=0):
        if document.line is None and document.path.stat().st_size:
            return
        if document.line is not None and (record := document.record()) and (record.get("text") or "messages" in record):
            return
    raise InputError(f"the data is empty: no text in {len(files)} file(s), {files[0]} …")


def check_lines(files: Sequence[Path], tokenizer: Any) -> None:
    """Read every line of JSON there is, at 100 MB a second and more, so that none that is malformed ends a run hours
    later. What the chat template thinks of a conversation shows when it is rendered.

    Raises InputError for the first.
    """
    from tqdm import tqdm

    lined = [path for path in files if path.suffix in JSON_LINES]
    size = sum(path.stat().st_size for path in lined)
    with tqdm(total=size, desc="checking data", unit="B", unit_scale=True, delay=2, leave=False, disable=None) as bar:
        for path in lined:
            for document in _lines(path, errors="surrogateescape"):
                bar.update(document.check(tokenizer))


def documents(files: Sequence[Path], seed: int, epoch: int) -> Iterator[Document]:
    """All documents of `files` once, in the order that (seed, epoch) gives."""
    rng = random.Random(f"{seed}/{epoch}")
    order = list(files)
    rng.shuffle(order)
    return mix(_in_order(order), rng, items=BUFFER_DOCUMENTS, size=lambda d: len(d.line or ""), most=BUFFER_CHARS)


def mix(
    stream: Iterable[T],
    rng: random.Random,
    *,
    items: int,
    size: Callable[[T], int] = lambda _: 0,
    most: int = 0,
) -> Iterator[T]:
    """Shuffle a stream through a buffer of `items` items, and of the total size `most`, whichever is less."""
    held: list[T] = []
    total = 0
    for item in stream:
        held.append(item)
        total += size(item)
        while len(held) >= items or total > most:
            chosen = _take(held, rng)
            total -= size(chosen)
            yield chosen
    while held:
        yield _take(held, rng)


def _take(held: list[T], rng: random.Random) -> T:
    index = rng.randrange(len(held))
    held[index], held[-1] = held[-1], held[index]
    return held.pop()


def _in_order(files: Iterable[Path]) -> Iterator[Document]:
    for path in files:
        if path.suffix in JSON_LINES:
            yield from _lines(path, errors="replace")
        else:
            yield Document(path)


def _lines(path: Path, errors: str) -> Iterator[Document]:
    with path.open(encoding="utf-8-sig", errors=errors) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield Document(path, line, number)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _below(folder: Path) -> list[Path]:
    """The files below a folder, sorted, but for hidden ones and those of runs."""
    found = sorted(folder.rglob("*"))
    runs = {p.parent for p in found if p.name == RUN and (p.parent / LOGS).is_dir()}
    found = [p for p in found if p.is_file() and not _is_hidden(p.relative_to(folder))]
    return [p for p in found if runs.isdisjoint(p.parents)]


def _why_no_text(path: Path) -> str:
    """Empty for what begins as UTF-8 text does. Of JSON, `check_lines` looks at every line."""
    try:
        with path.open("rb") as file:
            head = file.read(SNIFF_BYTES)
    except OSError as error:
        raise InputError(f"--data {path}: cannot be read ({error.strerror})") from None
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "it begins as UTF-16 does; convert it, with iconv for example"
    if b"\0" in head:
        return NUL
    try:
        if path.suffix not in JSON_LINES:
            codecs.getincrementaldecoder("utf-8")().decode(head)  # its last letter may be cut
    except UnicodeDecodeError as error:
        return f"byte {error.start} is none of it; convert it, with iconv for example"
    return ""
