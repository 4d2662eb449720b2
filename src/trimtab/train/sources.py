"""Files that `--data` names, in groups: folders as the hub has them, splits, weights."""

from __future__ import annotations

import codecs
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trimtab.errors import InputError
from trimtab.extras import required
from trimtab.train.readers import LINES, TABLES, head_of, is_records, kind_of
from trimtab.train.report import LOGS, RUN

SPLIT = "train"
"""Read of a folder that has several splits and is given without one."""
_ASIDE = re.compile(r"dataset_infos?\.json|dataset_dict\.json|state\.json|config\.json")
"""Files that `datasets` and the hub write beside data."""
BINARY = (".parquet", ".arrow")
NUL, NOT_UTF8 = "it holds NUL bytes", "it is not UTF-8"


@dataclass(frozen=True)
class Group:
    """Files that are drawn from as one, sorted. weight: their share of the blocks beside other groups'. unread: what
    lies there and is not read, in words."""

    files: list[Path]
    weight: float = 1.0
    unread: list[str] = field(default_factory=list)


def standard_library() -> list[Path]:
    """The source files of the running Python's standard library: the default training text."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return sorted(p for p in root.rglob("*.py") if not skipped.intersection(p.relative_to(root).parts))


def find_groups(names: Sequence[str]) -> list[Group]:
    """Find the data's files (the standard library's when none is named): one group, or one for each `PATH=WEIGHT`.

    A folder with files of records gives those of one split, and its .txt files; any other gives every text file in
    UTF-8 below it that is not hidden and that no run of `trimtab train` left there. Raises InputError for a path that
    does not exist or cannot be read, and where nothing is to be read.
    """
    if not names:
        return [Group(standard_library())]
    parsed = [_parse(name) for name in names]
    groups = [_find(name, path, split) for name, (path, split, _) in zip(names, parsed, strict=True)]
    weights = [weight for *_, weight in parsed if weight is not None]
    if not weights:
        return [Group([path for g in groups for path in g.files], unread=[word for g in groups for word in g.unread])]
    if len(weights) < len(names):
        raise InputError(f"--data {' '.join(names)}: give a weight to each path (PATH=0.3) or to none")
    return [replace(group, weight=weight / sum(weights)) for group, weight in zip(groups, weights, strict=True)]


def _parse(name: str) -> tuple[Path, str | None, float | None]:
    """Split PATH, PATH:split, PATH=0.3 or PATH:split=0.3; a path of that very name comes first."""
    path, split, weight = name, None, None
    if not Path(path).exists() and (found := re.fullmatch(r"(.+)=([0-9.e+-]+)", path)):
        path = found[1]
        try:
            weight = float(found[2])
        except ValueError:
            weight = 0.0
        if not 0 < weight < float("inf"):
            raise InputError(f"--data {name}: the weight {found[2]} is no positive number")
    if not Path(path).exists() and ":" in path:
        path, _, split = path.rpartition(":")
    if not Path(path).exists():
        raise InputError(f"--data {name}: no such file or directory")
    return Path(path), split, weight


def _find(name: str, path: Path, split: str | None) -> Group:
    if path.is_file():
        if split not in (None, SPLIT):
            raise InputError(f"--data {name}: a file has the split {SPLIT} alone; name the file of {split}")
        if kind_of(path) not in BINARY and (why := _why_no_text(path)):
            raise InputError(f"--data {name}: not a text file in UTF-8 ({why})")
        if kind_of(path) == ".json" and not is_records(path):
            raise InputError(f"--data {name}: holds no records; expected objects, or an array of them")
        return Group([path])
    if not path.is_dir():
        raise InputError(f"--data {name}: neither a file nor a folder; what comes through a pipe is read once only")
    below = _below(path)
    records = [p for p in below if is_records(p) and not _ASIDE.fullmatch(p.name)]
    if records:
        found = _of_split(name, path, records, split)
        found.files.extend(p for p in below if kind_of(p) == ".txt")
        if aside := [p for p in below if p not in {*records, *found.files}]:
            found.unread.append(f"{len(aside)} file(s) beside the data, as {aside[0].name}")
    elif split is not None:
        raise InputError(f"--data {name}: that folder holds no files of records, and so no splits")
    else:
        whys = {p: _why_no_text(p) for p in below}
        found = Group([p for p, word in whys.items() if not word])
        for word, what in ((NOT_UTF8, "are not UTF-8"), (NUL, "are no text")):
            if left := [p for p in below if whys[p].startswith(word)]:
                found.unread.append(f"{len(left)} file(s) that {what}, as {left[0]}")
    if not found.files:
        raise InputError(f"--data {name}: nothing to read there{f' ({found.unread[0]})' if found.unread else ''}")
    found.files.sort()
    return found


def _of_split(name: str, folder: Path, records: list[Path], split: str | None) -> Group:
    """The files of one split, by the names that `datasets` tells splits by; the others are counted as unread."""
    datasets = required("datasets", f"--data {name}: a folder of records", "train")
    from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns

    datasets.disable_progress_bars()
    try:
        found = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
    except EmptyDatasetError:
        found = {}
    splits = {str(each): [p for p in records if str(p.absolute()) in set(files)] for each, files in found.items()}
    splits = {each: files for each, files in splits.items() if files} or {SPLIT: records}
    wanted = split or (SPLIT if SPLIT in splits else next(iter(splits)))
    if wanted not in splits:
        raise InputError(f"--data {name}: no split {wanted} there, but {', '.join(splits)}")
    others = {each: len(files) for each, files in splits.items() if each != wanted}
    unread = [f"split {each} ({n} file(s)), given by {folder}:{each}" for each, n in others.items()]
    return Group(list(splits[wanted]), unread=unread)


def _below(folder: Path) -> list[Path]:
    """The files below a folder, sorted, but for hidden ones and those of runs."""
    found = sorted(folder.rglob("*"))
    runs = {p.parent for p in found if p.name == RUN and (p.parent / LOGS).is_dir()}
    shown = [p for p in found if not any(n[0] == "." or n == "__pycache__" for n in p.relative_to(folder).parts)]
    return [p for p in shown if p.is_file() and runs.isdisjoint(p.parents)]


def _why_no_text(path: Path) -> str:
    """Empty for a file that begins as UTF-8 text does. Records are checked one by one as they are read."""
    head = head_of(path)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return f"{NOT_UTF8}: it begins as UTF-16 does; convert it, with iconv for example"
    if b"\0" in head:
        return NUL
    try:
        if kind_of(path) not in (*LINES, *TABLES, ".json"):
            codecs.getincrementaldecoder("utf-8")().decode(head)  # its last letter may be cut
    except UnicodeDecodeError as error:
        return f"{NOT_UTF8}: byte {error.start} is none of it; convert it, with iconv for example"
    return ""
