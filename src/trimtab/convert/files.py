"""A folder as transformers' `save_pretrained` writes it: safetensors, one file or several with an index."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trimtab.convert.store import TensorInfo, TensorStore, is_left
from trimtab.convert.writing import writing
from trimtab.errors import InputError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 4 * 10**9
_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def holds_safetensors(folder: Path) -> bool:
    """Whether the folder has weights in this form, whole or not."""
    return _there(folder / SINGLE) or _there(folder / INDEX) or bool(_shards(folder))


class SafetensorsFolder:
    """The tensors of such a folder, read one by one.

    leave: globs; tensors of these names are in `left`, and are looked at no further.

    Raises:
        InputError: a file is missing, cut off, a folder, a link to nothing or not in the index; a name is nowhere or
            twice; an unknown dtype.
    """

    def __init__(self, folder: Path, *, leave: Sequence[str] = ()) -> None:
        self.folder, self.leave = folder, leave
        self.left: list[str] = []
        self._file_of: dict[str, str] = {}
        self._opened: dict[str, Any] = {}  # mapped into memory, not read
        self.infos: dict[str, TensorInfo] = {}
        named = self._named()
        for file in dict.fromkeys(named.values()) if named is not None else [SINGLE]:
            self._open(file)
        if named is not None and named != self._file_of:
            odd = sorted(name for name in {*named, *self._file_of} if named.get(name) != self._file_of.get(name))
            raise InputError(f"{folder / INDEX}: {len(odd)} tensors are not where it says, among them {odd[0]}")

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self._opened[self._file_of[name]].get_tensor(name) for name in names}

    def _named(self) -> dict[str, str] | None:
        """The index's word on which file holds what; None where there is one file."""
        folder, shards = self.folder, _shards(self.folder)
        if _there(folder / SINGLE):
            if _there(folder / INDEX) or shards:
                raise InputError(f"{folder}: {SINGLE} and {shards[0] if shards else INDEX}: which of them is meant?")
            return None
        if not _there(folder / INDEX):
            raise InputError(f"{folder}: {shards[0]} without {INDEX}: not written to its end")
        _check_file(folder / INDEX)
        try:
            named = dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{folder / INDEX}: not an index of safetensors ({error!r})") from None
        if absent := sorted(set(named.values()) - {p.name for p in folder.iterdir()}):
            raise InputError(f"{folder}: {absent[0]} is in the index, but not in the folder")
        if more := sorted(set(shards) - set(named.values())):
            raise InputError(f"{folder}: {more[0]} is in the folder, but not in the index")
        return named

    def _open(self, file: str) -> None:
        _check_file(self.folder / file)
        try:
            opened: Any = safe_open(self.folder / file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise InputError(f"{self.folder / file}: not a whole safetensors file ({error})") from error
        self._opened[file] = opened
        for name in list(opened.keys()):
            if name in self._file_of:
                raise InputError(f"{self.folder}: {name} is in {self._file_of[name]} and in {file}")
            self._file_of[name] = file
            if is_left(name, self.leave):
                self.left.append(name)
                continue
            kind = opened.get_slice(name)
            if kind.get_dtype() not in _DTYPES:
                raise InputError(
                    f"{self.folder / file}: {name} is {kind.get_dtype()}, not to be converted; what is to be left "
                    "behind must be named (--leave 'GLOB')"
                )
            self.infos[name] = TensorInfo(shape=tuple(kind.get_shape()), dtype=_DTYPES[kind.get_dtype()])


def write_safetensors(
    store: TensorStore, folder: Path, *, shard_bytes: int = SHARD_BYTES, done: Callable[[str], None]
) -> list[str]:
    """Write all of `store` into `folder`, in its order; returns the files' names.

    Memory: one file's tensors, `shard_bytes` or the largest tensor if that is more, beside what the store holds.
    Raises InputError where a file cannot be written.
    """
    files: list[list[str]] = [[]]
    room = shard_bytes
    for name, info in store.infos.items():
        if files[-1] and info.nbytes > room:
            files.append([])
            room = shard_bytes
        files[-1].append(name)
        room -= info.nbytes
    names = (
        [SINGLE]
        if len(files) == 1
        else [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    )
    for file, held in zip(names, files, strict=True):
        tensors: dict[str, Tensor] = {}
        for name in held:
            tensors |= {n: t.contiguous() for n, t in store.read([name]).items()}
            done(name)
        with writing(folder / file):
            save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(files) > 1:
        total = sum(info.nbytes for info in store.infos.values())
        weight_map = {name: file for file, held in zip(names, files, strict=True) for name in held}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        names = [*names, INDEX]
    return names


def _there(path: Path) -> bool:
    """Also where it is a link to nothing, as in a cache of the Hub that was cleared in part."""
    return path.exists() or path.is_symlink()


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise InputError(f"{path}: a folder, not a file; copy the checkpoint again")
    if not path.exists():
        raise InputError(f"{path}: a link to {path.readlink()}, which is not there; copy or download the file again")


def _shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if _SHARD.fullmatch(path.name))
