"""Files as records: a text, a conversation, or a prompt with its completion, each with its file and line.

`datasets` reads tables. It does not read JSON here: it would not say on which line a record lies, and turns rows of
several shapes into strings of JSON.
"""

from __future__ import annotations

import codecs
import io
import json
import random
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.errors import InputError, first_line

LINES = (".jsonl", ".ndjson")
TABLES = {".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
"""Suffixes that `datasets` reads, with the builder for each."""
COMPRESSED = (".gz", ".zst")
SNIFF_BYTES = 4096
PIECE_CHARS = 1 << 18
LINE_CHARS = 1 << 16
CONVERSATION = "a list of objects with `role` and `content`, or `from` and `value`"
EXPECTED = "`text`, `messages`, `conversations`, or `prompt` and `completion`"
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "observation": "tool"}
"""Other formats' names of roles; the chat template judges any other."""
NOT_REACHED = "rows that the steps of the run do not reach"
_RECORD = re.compile(rb'\s*\[?\s*\{[^{}\[\]]*"(text|messages|conversations|prompt|completion)"\s*:')


@dataclass(frozen=True, slots=True)
class Record:
    """One document: a conversation (`messages`, `tools`), a completion (`text` after `prompt`) or a plain text.

    place: file, and line or row. text: in pieces. unread: columns of the row that are not read.
    """

    path: Path
    place: str
    text: Iterable[str] = ()
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    unread: frozenset[str] = frozenset()

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
            yield Record(path, str(path), text=_read_text(path))
            continue
        table = kind_of(path) in TABLES
        for place, row in _rows(path) if table else _objects(path):
            record = _record(row, path, place)
            if table and record.kind == "text" and enough():
                yield replace(record, unread=record.unread | {NOT_REACHED})
                break
            yield record


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
                yield place, _parsed(line.removeprefix(codecs.BOM_UTF8), place, "one object per line")


def _parsed(text: bytes, place: str, expected: str) -> Any:
    try:
        return json.loads(text.decode())
    except UnicodeDecodeError:
        raise InputError(f"{place} is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place} is not JSON ({error}); expected {expected}") from None


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset
    from datasets.utils import logging

    logging.set_verbosity(logging.CRITICAL)
    kind = kind_of(path)
    options = {"keep_default_na": False} if kind == ".csv" else {}  # else "NA" and empty texts would be None
    with tempfile.TemporaryDirectory(prefix="trimtab-") as locks, _naming(path):
        found = load_dataset(
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
            import pyarrow  # whose readers, unlike others, say where a stream ends early

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
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or first_line(error)})") from None


def _read_text(path: Path) -> Iterator[str]:
    """A text file in pieces of about PIECE_CHARS characters that end at a line's end where lines are sane."""
    with opened(path) as binary:
        file = io.TextIOWrapper(binary, encoding="utf-8-sig", errors="replace")
        while piece := file.read(PIECE_CHARS):
            yield piece + file.readline(LINE_CHARS)


def _record(row: Any, path: Path, place: str) -> Record:
    if not isinstance(row, dict):
        raise InputError(f"{place} has a {type(row).__name__}; expected an object with {EXPECTED}")
    has = {key for key, value in row.items() if value is not None}
    if name := next((name for name in ("messages", "conversations") if name in has), None):
        read, made = {name}, Record(path, place, messages=_messages(row[name], place, name))
    elif {"prompt", "completion"} <= has:
        read, made = {"prompt", "completion"}, _answered(row, path, place)
    elif "text" in row:
        read, made = {"text"}, Record(path, place, text=[_string(row["text"], place, "text")])
    else:
        raise InputError(f"{place} has the keys {sorted(map(str, row))}; expected {EXPECTED}")
    if made.messages is not None:
        read, made = read | {"tools"}, replace(made, tools=_tools(row, place))
    return replace(made, unread=frozenset(row.keys() - read))


def _answered(row: dict[str, Any], path: Path, place: str) -> Record:
    """A prompt and its completion: two strings, or two lists of messages of which the second is learned."""
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str):
        text = [_string(completion, place, "completion")]
        return Record(path, place, prompt=_string(prompt, place, "prompt"), text=text)
    asked = [{**message, "train": False} for message in _messages(prompt, place, "prompt")]
    return Record(path, place, messages=[*asked, *_messages(completion, place, "completion")])


def _string(value: Any, place: str, name: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{place} has a `{name}` of the type {type(value).__name__}; expected a string")
    return value.encode("utf-8", "replace").decode()  # JSON can spell lone surrogates, which no tokenizer takes


def _decoded(value: Any, place: str, name: str) -> Any:
    """Decode, once, what some formats keep as JSON in a string."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: `{name}` is a string that is not JSON ({error})") from None


def _tools(row: dict[str, Any], place: str) -> list[Any] | None:
    tools = _decoded(row.get("tools") or None, place, "tools")
    if tools is not None and not isinstance(tools, list):
        raise InputError(f"{place}: `tools` must be a list")
    return [_decoded(tool, place, "tools") for tool in tools] if tools else None


def _messages(messages: Any, place: str, name: str) -> list[dict[str, Any]]:
    messages = _decoded(messages, place, name)
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InputError(f"{place}: `{name}` must be {CONVERSATION}")
    return [_message(message, place, name) for message in messages]


def _message(message: dict[str, Any], place: str, name: str) -> dict[str, Any]:
    made = {key: value for key, value in message.items() if value is not None}
    if "role" not in made and "from" in made:
        made = {"role": made.pop("from"), "content": made.pop("value", None), **made}
    if not isinstance(made.get("role"), str):
        raise InputError(f"{place}: `{name}` must be {CONVERSATION}")
    made["role"] = ROLES.get(made["role"], made["role"])
    made["content"] = _content(made.get("content", ""), place)  # templates print a content of None as "None"
    if "tool_calls" in made:
        calls = _decoded(made["tool_calls"], place, "tool_calls")
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise InputError(f"{place}: `tool_calls` must be a list of objects")
        made["tool_calls"] = [_call(call, place) for call in calls]
    return made


def _content(content: Any, place: str) -> str:
    """A message's text; parts of text are joined, for not every template takes a list."""
    joined = ""
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, dict) and part.get("type", "text") != "text":
            raise InputError(f"{place}: a message has a part of the type {part['type']}; only text can be trained on")
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise InputError(f"{place}: the `content` of a message must be a string, or a list of its parts")
        joined += text
    return joined.encode("utf-8", "replace").decode()


def _call(call: dict[str, Any], place: str) -> dict[str, Any]:
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _call(function, place)}
    return {**call, "arguments": _decoded(call["arguments"], place, "arguments")} if "arguments" in call else call
