"""Files to documents: kinds, order, messages."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.errors import InputError
from trimtab.train.sources import SNIFF_BYTES, check_documents, check_lines, documents, find_files, mix


def test_directory_gives_text_files_only(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name, content in {
        "a.txt": b"a", "sub/b.py": b"b", "c.bin": b"\0\1", ".hidden": b"h", ".git/x": b"x",
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
    assert [p.name for p in find_files([str(tmp_path)]).files] == ["a.txt", "b.py"]


def test_what_runs_left_is_no_data(tmp_path: Path) -> None:
    """Else a run would train on its own logs, and could not go on: its data had changed."""
    for name in ("a.txt", "runs/train/run.json", "runs/train/metrics.jsonl", "runs/train/logs/rank-0.log",
                 "runs/train/checkpoints/step-00000002/config.json", "runs/notes.txt", "other/run.json"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    found = [p.relative_to(tmp_path).as_posix() for p in find_files([str(tmp_path)]).files]
    assert found == ["a.txt", "other/run.json", "runs/notes.txt"]


def test_default_is_the_standard_library() -> None:
    names = {p.name for p in find_files([]).files}
    assert {"argparse.py", "os.py"} <= names


def test_other_encodings_are_left_out_by_name(tmp_path: Path) -> None:
    """Not read with letters replaced. A letter of UTF-8 that the look at the beginning cuts is none."""
    for name, content in {
        "latin.txt": "naïve".encode("latin-1"), "utf16.txt": "English".encode("utf-16"), "c.bin": b"\0\xff",
        "cut.txt": b"a" * (SNIFF_BYTES - 1) + "é".encode(), "bom.txt": "x".encode("utf-8-sig"), "l.jsonl": b"\xff",
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
    found = find_files([str(tmp_path), str(tmp_path / "cut.txt")])
    assert [p.name for p in found.files] == ["bom.txt", "cut.txt", "l.jsonl", "cut.txt"]
    assert [p.name for p in found.left_out] == ["latin.txt", "utf16.txt"]
    assert str(found) == f" (2 left out that are not UTF-8, as {tmp_path / 'latin.txt'})"
    for name in ("bom.txt", "cut.txt", "l.jsonl"):
        (tmp_path / name).unlink()
    with pytest.raises(
        InputError, match=r"no text file found there \(2 left out that are not UTF-8, as .*latin\.txt\)"
    ):
        find_files([str(tmp_path)])


@pytest.mark.parametrize("name", ["missing.txt", "binary.txt", "latin.txt", "empty"])
def test_refuses_unusable_paths(tmp_path: Path, name: str) -> None:
    (tmp_path / "binary.txt").write_bytes(b"\0")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=name):
        find_files([str(tmp_path / name)])


def test_order_depends_on_seed_and_epoch_alone(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(str(i))
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(f'{{"text": "{i}"}}\n\n' for i in range(50)))
    files = find_files([str(tmp_path)]).files

    def order(seed: int, epoch: int) -> list[str]:
        return [document.place for document in documents(files, seed, epoch)]

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(*key)) for key in [(1, 0), (1, 1), (2, 0)]}) == 3
    assert len(set(order(1, 0))) == 70
    assert sorted(order(1, 0)) == sorted(order(2, 5))


@given(st.lists(st.integers(0, 50), max_size=200), st.integers(1, 20), st.integers(0, 200))
def test_mixing_loses_nothing_and_holds_little(sizes: list[int], items: int, most: int) -> None:
    drawn = 0

    def stream() -> object:
        nonlocal drawn
        for size in sizes:
            drawn += 1
            yield drawn, size

    given_back: list[tuple[int, int]] = []
    for item in mix(stream(), random.Random(0), items=items, size=lambda item: item[1], most=most):  # type: ignore
        given_back.append(item)
        assert drawn - len(given_back) < max(items, 1)
    assert sorted(given_back) == list(enumerate(sizes, start=1))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{broken", "is not JSON"),
        ('{"content": "x"}', "the keys ['content']"),
        ('{"text": 3}', "a `text` of the type int"),
        ("[1]", "a list"),
    ],
)
def test_bad_records_name_file_and_line(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f"\n{line}\n")
    with pytest.raises(InputError) as error:
        check_documents([path], seed=0)
    assert f"{path}:2" in str(error.value)
    assert reason in str(error.value)


def test_data_without_any_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(InputError, match="empty"):
        check_documents(find_files([str(tmp_path)]).files, seed=0)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "caf\xe9"}', "not UTF-8"),
        (b'{"text": null}', "a `text` of the type NoneType"),
        (b'{"text": ' + b"[" * 100_000, "is not JSON"),
        (b'{"messages": [{"content": "hi"}]}', "objects with `role` and `content`"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "`content` of a message"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "tools": 1}', "`tools` must be a list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_no_line_of_json_is_left_unread(tmp_path: Path, line: bytes, reason: str) -> None:
    told = SimpleNamespace(chat_template="…")
    good = b'{"messages": [{"role": "assistant", "content": null, "tool_calls": []}]}\n\n{"text": "caf\xc3\xa9"}\n'
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + good * 700)
    check_lines(find_files([str(tmp_path)]).files, told)
    with pytest.raises(InputError, match=r"x\.jsonl:1.*the model's tokenizer has none"):
        check_lines(find_files([str(tmp_path)]).files, SimpleNamespace(chat_template=None))
    (tmp_path / "x.jsonl").write_bytes(good * 700 + line + b"\n" + good)
    with pytest.raises(InputError) as error:
        check_lines(find_files([str(tmp_path)]).files, told)
    assert f"{tmp_path / 'x.jsonl'}:2101" in str(error.value)
    assert reason in str(error.value)
