"""A checkpoint on disk: names, index, whole or unfinished. Imports no torch.

    ROOT/step-00000010/              whole: nothing gets this name before every rank has written and synced its files
        trimtab.json                 `Index`: format, versions, step, ranks, experts per layer, sizes of the other files
        .metadata, __<rank>_0.distcp torch.distributed.checkpoint, whole tensors of global shape by key:
                                         model.<name>         parameters and persistent buffers, as the module names
                                                              them (no wrapper's prefix); experts are [E, …] in one
                                         optim.<name>.<slot>  optimizer state of parameter <name>
        rank-00000.pt                what is one rank's own: random numbers, loads that `update_bias` has yet to see,
                                     states of recipes
        config.json                  of a transformers model, as `save_pretrained` writes it; of `trimtab train` also
                                     what `carried_files` finds beside it in the model's folder
    ROOT/step-00000010.unfinished/   a save that has not ended: being written, or killed

A kill at any moment leaves the whole ones as they are; the next `save` removes what is unfinished. All ranks write
into one folder: several machines need a file system that they share.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.errors import ConfigError, InputError

FORMAT = 3
INDEX, CONFIG, UNFINISHED = "trimtab.json", "config.json", ".unfinished"
MODEL, OPTIM = "model.", "optim."
CARRIED = (
    "generation_config.json", "tokenizer*.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.*", "*processor_config.json", "tekken.json", "*.tiktoken",
    "tiktoken.model", "spiece.model", "sentencepiece.bpe.model", "*.py",
)  # fmt: skip
"""Files that go with a model's weights wherever they go, beside config.json."""
_STEP = re.compile(r"step-(\d{8,})")
_OWN = re.compile(r"trimtab\.json|\.metadata(\.tmp)?|__\d+_\d+\.distcp|rank-\d{5,}\.pt")


@dataclass(frozen=True, kw_only=True)
class Index:
    """`trimtab.json`.

    step: optimizer steps taken. world: ranks that wrote it and left a file each; 0 for tensors alone.
    optimizer: its groups, each {"kind": class, "params": names, "options": lr, betas …, "values": numbers by name and
        slot}; None where no optimizer was saved.
    experts: by name of the experts module, its parameters' global shapes, the number of experts first.
    extra: what the caller added, JSON. files: bytes by name, of every other file of the folder.
    trimtab, torch: versions that wrote it. format: of the folder; another than FORMAT is refused.
    """

    step: int
    world: int
    experts: dict[str, dict[str, list[int]]]
    optimizer: list[dict[str, Any]] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    trimtab: str
    torch: str
    format: int = FORMAT


def step_folder(root: Path, step: int) -> Path:
    """The folder of the checkpoint of `step`."""
    return root / f"step-{step:08d}"


def rank_file(rank: int) -> str:
    """The name of a rank's own file."""
    return f"rank-{rank:05d}.pt"


def may_lie_beside(name: str) -> bool:
    """True if a caller's file may have this name: in the folder itself, and none of the checkpoint's own."""
    return name not in ("", "..") and Path(name).name == name and "\0" not in name and not _OWN.fullmatch(name)


def whole_checkpoints(root: Path | str) -> list[Path]:
    """The whole checkpoints below `root`, by step; none where there is no such folder."""
    return sorted((path for path in _steps(Path(root)) if _is_whole(path)), key=step_of)


def unfinished_checkpoints(root: Path | str) -> list[Path]:
    """Folders below `root` that are named like a checkpoint and are not whole: a save that never ended, half a copy."""
    return sorted(path for path in _steps(Path(root)) if not _is_whole(path))


def latest(root: Path | str) -> Path | None:
    """The whole checkpoint of the highest step below `root`, or None."""
    return next(reversed(whole_checkpoints(root)), None)


def resolve(path: Path | str) -> Path:
    """The checkpoint that `path` means: itself, or the latest below it.

    Raises InputError, naming what was left unfinished, where there is none that is whole.
    """
    path = Path(path)
    if _is_whole(path):
        return path
    if found := latest(path):
        return found
    if broken := [path] if is_step(path) and path.is_dir() else unfinished_checkpoints(path):
        names = ", ".join(p.name for p in broken)
        raise InputError(f"{path}: no whole checkpoint: {names} was not written to the end and cannot be loaded")
    raise InputError(f"{path}: no checkpoint there" if path.exists() else f"{path}: no such folder")


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name."""
    match = _STEP.match(folder.name)
    if match is None:
        raise InputError(f"{folder}: not named like a checkpoint (step-00000010)")
    return int(match[1])


def read_index(folder: Path | str) -> Index:
    """Read `trimtab.json` and check that the files it lists are there in full.

    Raises InputError for a folder that is no whole checkpoint, and for one of another format.
    """
    folder = Path(folder)
    if not _is_whole(folder):
        raise InputError(f"{folder}: not a whole checkpoint: its save did not end, or {INDEX} was not copied")
    try:
        fields = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        version = int(fields["format"])
        index = Index(**{f.name: fields[f.name] for f in dataclasses.fields(Index)}) if version == FORMAT else None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / INDEX}: not an index of a checkpoint ({error!r})") from None
    if index is None:
        do = "update it" if version > FORMAT else "load it with the trimtab that wrote it"
        raise InputError(
            f"{folder}: format {version}, written by trimtab {fields.get('trimtab')}; this trimtab reads format "
            f"{FORMAT}: {do}"
        )
    for name, size in index.files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if found != size:
            raise InputError(f"{folder}: not whole: {name} has {found} of {size} bytes; copy it again")
    return index


def write_index(folder: Path, index: Index) -> None:
    """Write `trimtab.json` with the sizes of the files that lie in `folder`, and sync all of it: the last file."""
    files = {p.name: p.stat().st_size for p in sorted(folder.iterdir()) if p.name != INDEX}
    text = json.dumps(dataclasses.asdict(dataclasses.replace(index, files=files)), indent=1) + "\n"
    with (folder / INDEX).open("w", encoding="utf-8") as file:
        file.write(text)
    for name in (*files, INDEX):
        sync(folder / name)
    sync(folder)


def carried_files(folder: Path) -> list[Path]:
    """The files of a model's folder that `CARRIED` names, sorted."""
    return sorted({path for pattern in CARRIED for path in folder.glob(pattern) if path.is_file()})


def begin(root: Path, step: int) -> Path:
    """Make the folder that a save writes into; what earlier saves left unfinished is removed. One rank calls.

    Raises ConfigError if there is a checkpoint of this step, whole or half of a copy, or `root` cannot be written.
    """
    folder = step_folder(root, step)
    if folder.exists() or folder.is_symlink():
        what = "a checkpoint" if _is_whole(folder) else f"half a checkpoint (no {INDEX})"
        raise ConfigError(f"{folder}: there is {what} of step {step} already; remove it or save elsewhere")
    try:
        root.mkdir(parents=True, exist_ok=True)
        for left in unfinished_checkpoints(root):
            if left.name.endswith(UNFINISHED):
                clear(left)
        unfinished = folder.with_name(folder.name + UNFINISHED)
        unfinished.mkdir()
    except OSError as error:
        raise ConfigError(f"{root}: cannot be written ({error.strerror})") from error
    return unfinished


def finish(unfinished: Path) -> Path:
    """Rename a folder whose files are all written and synced. One rank calls, after all have written."""
    folder = unfinished.with_name(unfinished.name.removesuffix(UNFINISHED))
    unfinished.rename(folder)
    sync(folder.parent)
    return folder


def remove(folder: Path) -> None:
    """Remove a checkpoint so that a kill leaves it whole or unfinished, never in between."""
    doomed = folder.with_name(folder.name + UNFINISHED)
    folder.rename(doomed)
    clear(doomed)


def clear(path: Path) -> None:
    """Remove a folder with all that is in it, or a link to one; do nothing if neither exists."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def sync(path: Path) -> None:
    """fsync a file, or a folder's entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _steps(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if is_step(path)] if root.is_dir() else []


def is_step(path: Path) -> bool:
    """True if a folder is named as a checkpoint is, whole or not."""
    return _STEP.fullmatch(path.name.removesuffix(UNFINISHED)) is not None


def _is_whole(path: Path) -> bool:
    return not path.name.endswith(UNFINISHED) and (path / INDEX).is_file()
