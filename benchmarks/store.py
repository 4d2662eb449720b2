"""Records in JSON files: written whole or not at all, read back with a clear message for what is something else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.result import Record
from trimtab.errors import InputError
from trimtab.whole_files import write_whole

FORMAT = 1


def write_records(records: Sequence[Record], path: Path) -> None:
    """Raises InputError where it cannot be written."""
    write(path, json.dumps({"trimtab_bench": FORMAT, "records": [record.as_json() for record in records]}))


def write(path: Path, text: str) -> None:
    """A result's file, whole or not at all; its folder is made. Raises InputError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error


def check_place(path: Path) -> None:
    """Whether a file can be written there, asked before a race takes its time; its folder is made.

    Raises:
        InputError: it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise InputError(f"{path}: cannot be written ({path.parent} is no folder)") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"{path}: cannot be written (a folder, or no permission)")


def read_records(paths: Iterable[Path]) -> list[Record]:
    """All records of files, in the order of the files. Raises InputError, naming the file."""
    records: list[Record] = []
    for path in paths:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            version = found["trimtab_bench"]
            records += [Record.from_json(record) for record in found["records"]]
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from error
        except (ValueError, KeyError, TypeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise InputError(
                f"{path}: not a file that this version of `python -m benchmarks` wrote ({what})"
            ) from error
        if version != FORMAT:
            raise InputError(f"{path}: format {version}, expected {FORMAT}; measure it anew")
    return records
