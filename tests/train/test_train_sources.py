"""Files to records: kinds, folders, splits, weights, shapes of rows, and what is wrong with one."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from trimtab.errors import InputError
from trimtab.train.messages import NOT_TEXT
from trimtab.train.readers import SNIFF_BYTES, Record, read_records
from trimtab.train.report import DataReport
from trimtab.train.sources import find_groups

CALLS = [
    {"function": {"name": "add", "arguments": {"a": 1}}},
    {"function": {"name": "find", "arguments": {"what": ["x"], "where": {"deep": None}}}},
]
ROWS = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]} for call in CALLS]
READ = [
    [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}] for call in CALLS
]


def read(*names: object) -> list[Record]:
    """All records of the data, in the order of their files and places."""
    files = [path for group in find_groups([str(name) for name in names]) for path in group.files]
    found = [record for path in files for record in read_records([path], 0, lambda: False)]
    return [Record(r.path, r.place, list(r.text), r.prompt, r.messages, r.tools) for r in found]


def names(*asked: object) -> list[list[str]]:
    return [[path.name for path in group.files] for group in find_groups([str(each) for each in asked])]


def write(folder: Path, **files: str | bytes) -> Path:
    """Files by name, `__` for a slash and `_` before the suffix for a dot."""
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.ndjson", "a.json", "a.parquet", "a.arrow", "a.jsonl.gz", "a.jsonl.zst", "a.json.gz"]
)
def test_every_kind_of_file_gives_the_same_conversations(tmp_path: Path, name: str) -> None:
    """Arguments of other calls are not mixed in, though a table has one schema for all rows."""
    path = tmp_path / name
    table = pa.Table.from_pylist(ROWS)
    if name.endswith(".parquet"):
        parquet.write_table(table, path)
    elif name.endswith(".arrow"):
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    else:
        content = (json.dumps(ROWS, indent=1) if ".json." in f"{name}." else LINES).encode()
        packed = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)(content)
        path.write_bytes(packed)
    read_back = [record.messages for record in read(path)]
    if path.suffix in (".parquet", ".arrow"):  # None stands for "no such key" there
        assert read_back == [READ[0], json.loads(json.dumps(READ[1]).replace('"deep": null', ""))]
    else:
        assert read_back == READ


def test_tables_and_texts(tmp_path: Path) -> None:
    write(tmp_path, a_csv='text,more\n"one\nNA",1\n"",2\nNA,3\n', b_txt="whole\n", c_parquet="")
    parquet.write_table(pa.table({"text": ["x", "y"]}), tmp_path / "c.parquet")
    assert [(r.place[len(str(tmp_path)) + 1 :], *r.text) for r in read(tmp_path)] == [
        ("a.csv: row 1", "one\nNA"), ("a.csv: row 2",), ("a.csv: row 3", "NA"),
        ("b.txt", "whole\n"), ("c.parquet: row 1", "x"), ("c.parquet: row 2", "y"),
    ]  # fmt: skip


QUOTED = '{"a": "\\"1\\""}'


def test_rows_of_many_shapes_in_one_file(tmp_path: Path) -> None:
    turn = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}, {"from": "observation", "value": "3"}]
    call = {"role": "model", "content": None, "tool_calls": json.dumps([{"name": "f", "arguments": QUOTED}])}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    rows: list[dict[str, Any]] = [
        {"text": "plain \ud800", "messages": None},
        {"conversations": turn, "id": 3},
        {"messages": [{"role": "user", "content": parts, "name": None}, call], "tools": '[{"name": "f"}]', "text": "x"},
        {"prompt": "2+2=", "completion": "4"},
        {"prompt": [{"role": "assistant", "content": "no"}], "completion": [{"role": "assistant", "content": "yes"}]},
    ]
    path = write(tmp_path, a_jsonl="".join(json.dumps(row) + "\n\n" for row in rows)) / "a.jsonl"
    text, said, called, asked, both = read(path)
    assert list(text.text) == ["plain \ufffd"]
    assert said.messages == [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "tool", "content": "3"},
    ]  # fmt: skip
    assert called.messages == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"a": '"1"'}}]},
    ]
    assert called.tools == [{"name": "f"}]
    assert (asked.prompt, list(asked.text), asked.place) == ("2+2=", ["4"], f"{path}:7")
    assert both.messages == [
        {"role": "assistant", "content": "no", "train": False}, {"role": "assistant", "content": "yes"},
    ]  # fmt: skip


def of_messages(*messages: dict[str, Any], key: str = "messages") -> str:
    return json.dumps({key: [{"role": "user", "content": "?"}, *messages]}) + "\n"


ADD = {"name": "add", "arguments": {"a": 1}}
ADDED = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": ADD}]}
TWICE = {**ADDED, "tool_calls": ADDED["tool_calls"] * 2}


@pytest.mark.parametrize(
    ("messages", "read_as"),
    [
        ([{"role": "assistant", "content": None, "function_call": ADD}], [ADDED]),
        ([{"role": "assistant", "function_call": {**ADD, "arguments": '{"a": 1}'}}], [ADDED]),
        ([{"from": "gpt", "value": "", "function_call": json.dumps(ADD)}], [ADDED]),
        ([{"from": "function_call", "value": json.dumps(ADD)}], [ADDED]),
        ([{"role": "tool_call", "content": json.dumps(ADD)}] * 2, [TWICE]),
        ([{"role": "tool_call", "content": json.dumps(ADD), "loss": n} for n in (0, 1)],
         [{**ADDED, "loss": 0}, {**ADDED, "loss": 1}]),
        ([{"role": "Assistant", "content": "a"}], [{"role": "assistant", "content": "a"}]),
        ([{"from": "GPT", "value": "a"}], [{"role": "assistant", "content": "a"}]),
        ([{"role": " Function_Call ", "content": json.dumps(ADD)}], [ADDED]),
        ([{"from": "gpt", "content": "a"}], [{"role": "assistant", "content": "a"}]),
        ([{"role": "function_call", "content": json.dumps([ADD, {"function": ADD}])}], [
            {**ADDED, "tool_calls": [ADDED["tool_calls"][0], {"function": ADD}]},
        ]),
        ([{"role": "function", "name": "add", "content": "1"}], [{"role": "tool", "name": "add", "content": "1"}]),
        ([{"role": "tool_response", "content": "1"}], [{"role": "tool", "content": "1"}]),
        ([{"role": "assistant", "content": None, "refusal": "No."}], [{"role": "assistant", "content": "No."}]),
        ([{"role": "assistant", "content": "Yes.", "refusal": ""}], [{"role": "assistant", "content": "Yes."}]),
    ],
)  # fmt: skip
def test_calls_results_and_refusals_of_other_formats(
    tmp_path: Path, messages: list[dict[str, Any]], read_as: list[dict[str, Any]]
) -> None:
    (record,) = read(write(tmp_path, a_jsonl=of_messages(*messages)) / "a.jsonl")
    assert record.messages is not None
    assert record.messages[1:] == read_as


def test_what_is_odd_is_counted_and_said_once(tmp_path: Path) -> None:
    """An answer that says nothing, whatever it thinks, is not learned; keys and roles that nobody knows are named."""
    empty = [
        {"role": "assistant", "content": content, **more}
        for content in ("", " \n", "<think>\nhm\n</think>\n", [], None)
        for more in ({}, {"tool_calls": []}, {"reasoning": "hm", "mood": 1}) if content is not None or more
    ]  # fmt: skip
    words = {"role": "assistant", "content": "so", "mood": "good", "name": "a", "loss": True, "thinking": "hm"}
    critic = {"role": "critic", "content": "\0 \ud800", "reasoning": "hm"}
    path = write(tmp_path, a_jsonl=of_messages(*empty) + of_messages(words, critic)) / "a.jsonl"
    report = DataReport([])
    for record in read_records([path], 0, lambda: False):
        learned = [m for m in record.messages or () if m["role"] == "assistant" and m.get("train") is not False]
        assert len(learned) == ("'so'" in str(record.messages))
        report.see(record)
    assert sorted(report.odd) == sorted([
        f"14 answer(s) without words or calls, left out (first in {path}:1)",
        f"6 message(s) with the unknown key `mood` (first in {path}:1)",
        f"1 message(s) with the unknown key `reasoning` (first in {path}:2)",
        f"1 message(s) of the role `critic`, not learned (first in {path}:2)",
        f"1 byte(s) that are not UTF-8, read as \ufffd (first in {path}:2)",
        f"1 NUL character(s) (first in {path}:2)",
    ])  # fmt: skip
    assert "; odd: 14 answer(s)" in report.summary()


def test_results_without_a_call_and_roles_in_other_cases_are_said(tmp_path: Path) -> None:
    result = {"role": "tool", "content": "1"}
    lines = [
        of_messages(ADDED, result, result),
        of_messages(result),
        of_messages({"from": "GPT", "value": "a"}, result),
    ]
    lines += [json.dumps({"prompt": [{"role": "User", "content": "?"}, ADDED], "completion": [result, ADDED]})]
    path = write(tmp_path, a_jsonl="".join(lines)) / "a.jsonl"
    odd = [+record.odd for record in read_records([path], 0, lambda: False)]
    orphan = "message(s) of the role tool without a call before"
    assert odd == [
        Counter(),
        Counter({orphan: 1}),
        Counter({"message(s) of the role `GPT`, read as gpt": 1, orphan: 1}),
        Counter({"message(s) of the role `User`, read as user": 1}),
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_a_message_that_says_nothing_is_named_in_any_kind_of_file(tmp_path: Path, name: str) -> None:
    """In a table a missing `content` is None. The file beside it is well, and so are the rows before."""
    good = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]
    rows = [{"messages": good}] * 3 + [{"messages": [good[0], {"role": "assistant", "content": None}]}]
    path = tmp_path / name
    if name == "a.parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if name == "a.json" else "\n".join(map(json.dumps, rows)))
    write(tmp_path, b_jsonl=json.dumps(rows[0]) + "\n")
    with pytest.raises(InputError) as error:
        read(tmp_path)
    assert str(error.value).startswith(f"{path}:4: " if name == "a.jsonl" else f"{path}: row 4: ")
    assert "role `assistant` has neither `content` nor `tool_calls`" in str(error.value)


def test_what_is_odd_in_a_prompt_is_counted(tmp_path: Path) -> None:
    """But for its empty answers: no answer of a prompt is learned."""
    asked = [{"role": "user", "content": "\0 \ud800", "thinking": True}, {"role": "assistant", "content": ""}]
    said = [{"role": "assistant", "content": "so", "mood": 1}]
    path = write(tmp_path, a_jsonl=json.dumps({"prompt": asked, "completion": said})) / "a.jsonl"
    (record,) = read_records([path], 0, lambda: False)
    assert record.odd == Counter({
        "NUL character(s)": 1, NOT_TEXT: 1, "message(s) with the unknown key `thinking`": 1,
        "message(s) with the unknown key `mood`": 1,
    })  # fmt: skip


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.parquet"])
def test_bytes_that_are_no_text_are_counted_wherever_they_lie(tmp_path: Path, name: str) -> None:
    path, text = tmp_path / name, "é" * SNIFF_BYTES + "\0" * 5
    if name.startswith("a.txt"):
        content = text.encode() + "naïve é".encode("latin-1") + b"end"
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    elif name == "a.jsonl":
        path.write_text(json.dumps({"text": f"{text}na\udcefve \udce9end"}))
    else:
        parquet.write_table(pa.table({"text": [f"{text}end"]}), path)
    (record,) = read_records([path], 0, lambda: False)
    read_as = "".join(record.text)
    assert read_as == (f"{text}end" if name == "a.parquet" else f"{text}na\ufffdve \ufffdend")
    assert +record.odd == Counter({"NUL character(s)": 5, NOT_TEXT: read_as.count("\ufffd")}) + Counter()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{broken", "is not JSON"),
        ('{"text": ' + "[" * 100_000, "is not JSON"),
        (b'{"text": "caf\xe9"}', "not UTF-8"),
        ('{"content": "x"}', "the keys ['content']"),
        ('{"text": 3}', "a `text` of the type int"),
        ('{"text": null}', "a `text` of the type NoneType"),
        ("[1]", "a list"),
        ('{"messages": "hi"}', "`messages` is a string that is not JSON"),
        ('{"messages": [{"content": "hi"}]}', "objects with `role` and `content`"),
        ('{"messages": [{"role": "user", "content": 5}]}', "`content` of a message"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "a part of the type image"),
        ('{"messages": [], "tools": 1}', "`tools` must be a list"),
        ('{"messages": [{"role": "a", "tool_calls": 1}]}', "`tool_calls` must be a list of objects"),
        ('{"messages": [{"role": "a", "tool_calls": [{"arguments": "{"}]}]}', "`arguments` is a string that is not"),
        (of_messages({"role": "assistant", "tool_calls": [{"arguments": {}}]}), "has no `name`"),
        (of_messages({"role": "assistant", "function_call": ADD, "tool_calls": [ADD]}), "has two kinds of calls"),
        (of_messages({"role": "assistant", "content": "a", "refusal": "b"}), "has `content` and `refusal`"),
        (of_messages({"role": "tool_call", "content": "[1]"}), "has no `name`"),
        (of_messages({"role": "assistant", "function_call": '"add"'}), "has no `name`"),
        (of_messages({"role": "tool_call", "content": "add(1)"}), "`tool_call` is a string that is not JSON"),
        (of_messages({"role": "assistant", "content": "a", "reasoning": 5}), "the `reasoning` of a message"),
        ('{"messages": [{"role": "user"}]}', "role `user` has neither `content` nor `tool_calls`"),
        (of_messages({"role": "assistant"}), "role `assistant` has neither"),
        (of_messages({"role": "assistant", "content": None, "name": "a"}), "role `assistant` has neither"),
        (of_messages({"role": "assistant", "value": "a"}), "role `assistant` has neither"),
        (of_messages({"role": "tool", "tool_call_id": "1"}), "role `tool` has neither"),
        (of_messages({"role": "tool_call", "content": None}), "role `tool_call` has neither"),
        (of_messages({"role": "Assistant"}), "role `assistant` has neither"),
        (of_messages({"from": "gpt"}, key="conversations"), "role `gpt` has neither"),
        (of_messages({"role": "user", "content": {"type": "image"}}), "a part of the type image"),
        (of_messages({"role": "user", "content": True}), "`content` of a message"),
        ('{"prompt": [{"role": "user"}], "completion": [{"role": "assistant", "content": "a"}]}', "`user` has neither"),
        ('{"prompt": "x", "completion": []}', "a `completion` of the type list"),
    ],
)
def test_bad_records_name_file_and_line(tmp_path: Path, line: str | bytes, reason: str) -> None:
    good = '{"text": "caf\u00e9"}\n\n'.encode()
    line = line.rstrip(b"\n") if isinstance(line, bytes) else line.rstrip("\n").encode()
    path = write(tmp_path, x_jsonl=b"\xef\xbb\xbf" + good * 700 + line + b"\n" + good) / "x.jsonl"
    with pytest.raises(InputError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}:1401")
    assert reason in str(error.value)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow", "a.json", "a.csv"])
def test_half_a_file_is_named(tmp_path: Path, name: str) -> None:
    content = {
        ".gz": gzip.compress(b'{"text": "x"}\n' * 9)[:-9], ".zst": zstandard.compress(LINES.encode() * 9)[:-3],
        ".json": b'[{"text": "x"}, {"text": ', ".csv": b'text,more\n"x",1\n"y',
    }.get(Path(name).suffix, b"PAR1")  # fmt: skip
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=f"{name}:? (is not JSON|cannot be read|row 1 )"):
        read(tmp_path / name)


def test_a_folder_as_the_hub_has_it(tmp_path: Path) -> None:
    row = '{"text": "x"}\n'
    hub = write(
        tmp_path / "hub", README_md="read me", LICENSE="mine", data__train_jsonl=row, data__test_jsonl=row,
        dataset_infos_json='{"text": 1}', notes_txt="a text",
    )  # fmt: skip
    (hub / ".gitattributes").write_text("x")
    (group,) = find_groups([str(hub)])
    assert [path.name for path in group.files] == ["train.jsonl", "notes.txt"]
    assert group.unread == [f"split test (1 file(s)), given by {hub}:test", "2 file(s) beside the data, as LICENSE"]
    assert names(f"{hub}:test") == [["test.jsonl", "notes.txt"]]
    with pytest.raises(InputError, match="no split dev there, but train, test"):
        names(f"{hub}:dev")
    for split in ("train", "test"):
        write(tmp_path / "disk", **{f"{split}__data-0_arrow": "", f"{split}__state_json": "{}"})
    (group,) = find_groups([str(tmp_path / "disk:test")])
    assert [str(p.relative_to(tmp_path)) for p in group.files] == ["disk/test/data-0.arrow"]
    alone = write(tmp_path / "alone", alpaca_json='[\n {"prompt": "a", "completion": "b"}]', README_md="#")
    assert names(alone) == [["alpaca.json"]]
    code = write(tmp_path / "code", main_py="x", package_json='{"name": 1}', README_md="#", c_bin=b"\0")
    (group,) = find_groups([str(code)])
    assert [path.name for path in group.files] == ["README.md", "main.py", "package.json"]
    assert group.unread == [f"1 file(s) that are no text, as {code / 'c.bin'}"]


def test_weights_and_splits_are_told_from_names(tmp_path: Path) -> None:
    write(tmp_path, **{"a_jsonl": "{}", "b_jsonl": "{}", "lang=0.5__c_txt": "c", "d:e_txt": "d"})
    first, second = find_groups([f"{tmp_path / 'a.jsonl'}=3", f"{tmp_path / 'b.jsonl'}:train=1e0"])
    assert (first.weight, second.weight) == (0.75, 0.25)
    assert names(tmp_path / "a.jsonl", tmp_path / "lang=0.5", tmp_path / "d:e.txt") == [["a.jsonl", "c.txt", "d:e.txt"]]
    for asked, why in {
        ("a.jsonl=1", "b.jsonl"): "to each path", ("a.jsonl=0",): "no positive number", ("a.jsonl:test",): "alone",
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=why):
            names(*(tmp_path / each for each in asked))


def test_what_runs_left_and_what_is_hidden_is_no_data(tmp_path: Path) -> None:
    """Else a run would train on its own logs, and could not go on: its data had changed."""
    for name in ("a.txt", "runs/train/run.json", "runs/train/metrics.jsonl", "runs/train/logs/rank-0.log",
                 "runs/train/checkpoints/step-00000002/config.json", "runs/notes.txt", "other/run.json",
                 ".git/x", ".hidden"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert names(tmp_path) == [["a.txt", "run.json", "notes.txt"]]
    assert {"argparse.py", "os.py"} <= set(names()[0])


def test_other_encodings_are_left_out_by_name(tmp_path: Path) -> None:
    """Not read with letters replaced. A letter of UTF-8 that the look at the beginning cuts is none."""
    cut = b"a" * (SNIFF_BYTES - 1) + "é".encode()
    write(tmp_path, latin_txt="naïve".encode("latin-1"), utf16_txt="English".encode("utf-16"), cut_txt=cut)
    write(tmp_path, bom_txt="x".encode("utf-8-sig"))
    (group,) = find_groups([str(tmp_path)])
    assert [path.name for path in group.files] == ["bom.txt", "cut.txt"]
    assert group.unread == [f"2 file(s) that are not UTF-8, as {tmp_path / 'latin.txt'}"]
    assert [next(iter(record.text))[0] for record in read(tmp_path / "bom.txt")] == ["x"]


@pytest.mark.parametrize("name", ["missing.txt", "binary.txt", "latin.txt", "empty", "list.json"])
def test_refuses_unusable_paths(tmp_path: Path, name: str) -> None:
    write(tmp_path, binary_txt=b"\0", latin_txt="naïve".encode("latin-1"), list_json="[]")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=name):
        names(tmp_path / name)
