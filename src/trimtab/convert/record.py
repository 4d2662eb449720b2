"""convert.json: the hashes and layouts of what a conversion wrote, so that the next one sees what was changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trimtab.convert.layouts import ExpertLayout
from trimtab.errors import InputError

RECORD = "convert.json"
FORMAT = "trimtab.convert"
VERSION = 2


@dataclass(frozen=True, kw_only=True)
class Record:
    """Of a folder that was written by a conversion.

    layout: "transformers", or the name of the layout of MoE blocks that are `trimtab.MoE`.
    experts: by experts module of transformers' model, its layout there.
    source_hash: over the tensors that were converted, under their names in the source.
    hash, tensors: over this folder's tensors, and of each alone.
    """

    layout: str
    experts: dict[str, dict[str, Any]]
    source_hash: str
    hash: str
    tensors: dict[str, str]


def content_hash(hashes: Mapping[str, str]) -> str:
    """One hash over all tensors, whatever their order and the files that they lie in."""
    lines = "".join(f"{name} {hashes[name]}\n" for name in sorted(hashes))
    return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"


def write_record(folder: Path, record: Record) -> None:
    """Write `convert.json`."""
    content = {"format": FORMAT, "version": VERSION, **asdict(record)}
    (folder / RECORD).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_record(folder: Path) -> Record | None:
    """That of a folder; None where no conversion wrote it. Raises InputError for one that cannot be read."""
    if not (folder / RECORD).is_file():
        return None
    try:
        content = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        form, version = content.pop("format"), content.pop("version")
        if (form, version) == (FORMAT, VERSION):
            return Record(**content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder / RECORD}: not the record of a conversion ({error!r})") from None
    raise InputError(
        f"{folder / RECORD}: {form} of version {version}, this trimtab reads {FORMAT} of version {VERSION}; without "
        "the file, the folder is converted without comparing it with what was written"
    )


def check_layouts(record: Record | None, folder: Path, experts: Mapping[str, ExpertLayout]) -> None:
    """Raises InputError where transformers now lays experts out in another way than when the folder was written."""
    for name, layout in experts.items():
        said = None if record is None else record.experts.get(name)
        if said is not None and said != layout.as_json():
            raise InputError(
                f"{folder}: {name} was written as {said}, but the installed transformers takes it as {layout.as_json()}"
            )


def check_content(record: Record | None, folder: Path, hashes: Mapping[str, str]) -> None:
    """Raises InputError where a tensor is not what the conversion that wrote the folder put there."""
    if record is None:
        return
    names = record.tensors.keys() | hashes.keys()
    changed = sorted(name for name in names if record.tensors.get(name) != hashes.get(name))
    if changed:
        raise InputError(
            f"{folder}: {len(changed)} tensors are not what was written there, among them {changed[0]}: its hash is "
            f"{content_hash(hashes)}, {RECORD} says {record.hash}. If that is meant, remove {RECORD}"
        )
