"""Folders of tensors, read and written one by one in one process: checkpoints of `trimtab.checkpoint`, and safetensors.

`SafetensorsFolder` is as transformers' `save_pretrained` writes it, one file or several with an index. Not by torch's
HuggingFaceStorageReader and -Writer: one reads any safetensors that lie in the folder and no index, the other holds a
file three times in memory.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from io import BufferedReader
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from trimtab.checkpoint.folder import MODEL, read_index
from trimtab.checkpoint.tensors import SavePlanner, read_dcp, stored, write_dcp
from trimtab.convert.tensors import TensorInfo, TensorStore, bits
from trimtab.errors import InputError, full_disk

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 4 * 10**9
_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn, "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16,
    "I32": torch.int32, "F32": torch.float32, "F64": torch.float64, "I64": torch.int64,
}  # fmt: skip
"""In the order in which tensors lie in a file, from its end."""


class DcpFolder(TensorStore):
    """The model's tensors of a whole checkpoint folder, by their names in the module.

    optimizer: key -> bytes, of every entry that is not the model's.
    whole: False for a folder that is being written and has no index yet.

    Raises:
        InputError: the folder is not whole or damaged, or a tensor is stored in part.
    """

    def __init__(self, folder: Path, *, whole: bool = True) -> None:
        self.folder = folder
        if whole:
            read_index(folder)
        self.infos: dict[str, TensorInfo] = {}
        self.optimizer: dict[str, int] = {}
        found = stored(folder)
        for key, held in found.items():
            if not isinstance(held, TensorStorageMetadata):
                if key.startswith(MODEL):
                    raise InputError(f"{folder}: {key} is no tensor and has no place in safetensors")
                self.optimizer[key] = 0
                continue
            info = TensorInfo(shape=tuple(held.size), dtype=held.properties.dtype)
            if not key.startswith(MODEL):
                self.optimizer[key] = info.nbytes
                continue
            self.infos[key.removeprefix(MODEL)] = info
            values = sum(math.prod(chunk.sizes) for chunk in held.chunks)
            if values != math.prod(info.shape):
                raise InputError(f"{folder}: {key} is {info}, but {values} of its values are stored")
        if not self.infos:
            raise InputError(f"{folder}: holds no tensor of a model ({MODEL}...), only {sorted(found)[:3]}")

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        self._whole = None
        planner = _Taking()
        tensors = {MODEL + n: torch.empty(self.infos[n].shape, dtype=self.infos[n].dtype, device="cpu") for n in names}
        read_dcp(self.folder, tensors, alone=True, planner=planner)
        tensors |= planner.taken
        return {n: tensors[MODEL + n].contiguous() for n in names}


class _Taking(DefaultLoadPlanner):
    """Takes tensors that lie in one piece as torch's reader has them, where it would copy them into others."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.taken: dict[str, Tensor] = {}

    def resolve_tensor(self, read_item: ReadItem) -> Any:
        target, key = super().resolve_tensor(read_item), read_item.dest_index.fqn
        if target.shape != self.state_dict[key].shape:
            return target
        held = SimpleNamespace(size=target.size, copy_=partial(self.taken.__setitem__, key))
        held.detach = lambda: held
        return held


def write_store(store: TensorStore, folder: Path, *, done: Callable[[str], None]) -> None:
    """Write all of `store` into `folder` as the model's tensors. Memory: one tensor beside what the store holds."""
    empty = {MODEL + name: info.meta() for name, info in store.infos.items()}
    write_dcp(folder, empty, alone=True, planner=_FillingPlanner(store, done))


class _FillingPlanner(SavePlanner):
    """Plans on tensors of the meta device and fills each when it is written, after the memory of the last is freed:
    torch's writer holds all tensors of a file."""

    def __init__(self, store: TensorStore, done: Callable[[str], None]) -> None:
        super().__init__()
        self.store, self.done, self._last = store, done, torch.empty(0)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        name = write_item.index.fqn.removeprefix(MODEL)
        self._last.untyped_storage().resize_(0)
        info, at = self.store.infos[name], 0
        self._last = torch.empty(info.shape, dtype=info.dtype, device="cpu")
        for block in self.store.blocks(name):
            self._last.view(-1)[at : (at := at + block.numel())] = block.flatten()
        self.done(name)
        return self._last


def holds_safetensors(folder: Path) -> bool:
    """True if the folder has weights in this form, whole or not."""
    return any(map(_is_weights, _names(folder)))


class SafetensorsFolder(TensorStore):
    """The tensors of such a folder, read one by one.

    Raises:
        InputError: a file is missing, cut off or not in the index; a name is nowhere or twice; an unknown dtype.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, str] = {}
        self._start: dict[str, int] = {}  # of a tensor's bytes in its file
        self._opened: dict[str, BufferedReader] = {}  # files that stay what they were, whatever becomes of the folder
        self.infos: dict[str, TensorInfo] = {}
        indexed = self._read_index()
        for file in [SINGLE] if indexed is None else dict.fromkeys(indexed.values()):
            self._open(file)
        if indexed is not None and indexed != self._file_of:
            odd = sorted(n for n in {*indexed, *self._file_of} if indexed.get(n) != self._file_of.get(n))
            raise InputError(f"{folder / INDEX}: {len(odd)} tensors are not where it says, among them {odd[0]}")

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self._read(name, self.infos[name].shape) for name in names}

    def read_rows(self, name: str, rows: slice) -> Tensor:
        return self._read(name, (rows.stop - rows.start, *self.infos[name].shape[1:]), rows.start)

    def _read(self, name: str, shape: Sequence[int], row: int = 0) -> Tensor:
        """Rows of a tensor. What is mapped into memory, as safetensors does, stays there until the file is closed."""
        tensor = torch.empty(shape, dtype=self.infos[name].dtype, device="cpu")
        file = self._opened[self._file_of[name]]
        file.seek(self._start[name] + (row and row * tensor.nbytes // len(tensor)))
        if file.readinto(bits(tensor).numpy().data) < tensor.nbytes:
            raise InputError(f"{self.folder / self._file_of[name]}: ends before {name} does")
        return tensor

    def _read_index(self) -> dict[str, str] | None:
        """Tensor name -> file, by the index; None where there is one file and no index."""
        folder, names = self.folder, _names(self.folder)
        shards = [name for name in names if _SHARD.fullmatch(name)]
        if SINGLE in names:
            if INDEX in names or shards:
                raise InputError(f"{folder}: {SINGLE} and {shards[0] if shards else INDEX}: which of them is meant?")
            return None
        if INDEX not in names:
            raise InputError(f"{folder}: {shards[0]} without {INDEX}: not written to its end")
        try:
            indexed = dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{folder / INDEX}: cannot be read as an index of safetensors ({error!r})") from None
        if absent := sorted(set(indexed.values()) - set(names)):
            raise InputError(f"{folder}: {absent[0]} is in the index, but not in the folder")
        if more := sorted(set(shards) - set(indexed.values())):
            raise InputError(f"{folder}: {more[0]} is in the folder, but not in the index")
        return indexed

    def _open(self, file: str) -> None:
        try:
            with safe_open(self.folder / file, framework="pt") as opened:
                names = list(opened.keys())
            raw = self._opened[file] = (self.folder / file).open("rb")
            size = int.from_bytes(raw.read(8), "little")
            header = json.loads(raw.read(size))
        except (SafetensorError, OSError) as error:
            raise InputError(f"{self.folder / file}: not a whole safetensors file ({error})") from error
        for name in names:
            if name in self._file_of:
                raise InputError(f"{self.folder}: {name} is in {self._file_of[name]} and in {file}")
            self._file_of[name] = file
            code, shape, (start, _) = (header[name][key] for key in ("dtype", "shape", "data_offsets"))
            if code not in _DTYPES:
                raise InputError(f"{self.folder / file}: {name} is {code}, not to be converted")
            self.infos[name] = TensorInfo(shape=tuple(shape), dtype=_DTYPES[code])
            self._start[name] = 8 + size + start


def planned(store: TensorStore, shard_bytes: int | str) -> StateDictSplit:
    """Which tensors go into which file. One above `shard_bytes` has its own, before the one being filled."""
    return split_torch_state_dict_into_shards({n: i.meta() for n, i in store.infos.items()}, max_shard_size=shard_bytes)


def parts(store: TensorStore, plan: StateDictSplit) -> Iterator[Iterator[Tensor]]:
    """Each tensor in blocks, in the order in which files are written: of ranks, all must read in this one."""
    return (store.blocks(name) for names in plan.filename_to_tensors.values() for name in names)


def write_safetensors(
    store: TensorStore, folder: Path, *, shard_bytes: int | str, done: Callable[[str], None] = lambda name: None,
    read_on: bool = False, **facts: Any,
) -> None:  # fmt: skip
    """Write all of `store` into `folder`, in its order, with the bytes of safetensors' own `save_file`. Weights of an
    earlier save, in files of other names, are removed at the end.

    Memory: what the store holds, and a block of rows. facts: for the metadata of the index, if there is one.
    read_on: before InputError is raised of a file that cannot be written, read the rest, which other ranks send.
    """
    plan = planned(store, shard_bytes)
    rest = parts(store, plan)
    part: Iterator[Tensor] = iter(())
    try:
        for file, names in plan.filename_to_tensors.items():
            header, starts = _header({name: store.infos[name] for name in names})
            with writing(folder / file), (folder / file).open("wb") as out:
                out.write(header)
                for name in names:
                    out.seek(starts[name])
                    part = next(rest)
                    for block in part:
                        out.write(bits(block).numpy().data)
                    done(name)
    except Exception:
        deque(chain(part, chain.from_iterable(rest)) if read_on else (), maxlen=0)
        raise
    with writing(folder / INDEX):
        if plan.is_sharded:
            index = {"metadata": facts | plan.metadata, "weight_map": dict(sorted(plan.tensor_to_filename.items()))}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        for name in filter(_is_weights, {*_names(folder)} - {*plan.filename_to_tensors, INDEX * plan.is_sharded}):
            (folder / name).unlink()


def _header(infos: Mapping[str, TensorInfo]) -> tuple[bytes, dict[str, int]]:
    """(what a file begins with, where in it each tensor does): by dtype, the widest first, then by name."""
    codes, held = list(_DTYPES), {dtype: code for code, dtype in _DTYPES.items()}
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(infos, key=lambda name: (-codes.index(held[infos[name].dtype]), name.encode())):
        info = infos[name]
        fields[name] = {"dtype": held[info.dtype], "shape": info.shape, "data_offsets": [end, end := end + info.nbytes]}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {n: start + fields[n]["data_offsets"][0] for n in infos}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around code that writes `path`: an OSError becomes InputError, with the room that is left on a full disk."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be written: {error}{full_disk(path.parent)}") from error


def _names(folder: Path) -> list[str]:
    """File names, links to nothing among them (a cache of the Hub that was cleared in part): opening them says so."""
    return sorted(path.name for path in folder.iterdir())


def _is_weights(name: str) -> bool:
    return name in (SINGLE, INDEX) or _SHARD.fullmatch(name) is not None
