"""A checkpoint of `trimtab.checkpoint` as named tensors, read and written one by one, in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from trimtab.checkpoint.folder import MODEL, read_index
from trimtab.checkpoint.tensors import SavePlanner, metadata_of, read_dcp, write_dcp
from trimtab.convert.tensors import TensorInfo, TensorStore
from trimtab.errors import InputError


class DcpFolder:
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
        found = metadata_of(folder).state_dict_metadata
        for key, stored in found.items():
            if not isinstance(stored, TensorStorageMetadata):
                if key.startswith(MODEL):
                    raise InputError(f"{folder}: {key} is no tensor and has no place in safetensors")
                self.optimizer[key] = 0
                continue
            info = TensorInfo(shape=tuple(stored.size), dtype=stored.properties.dtype)
            if not key.startswith(MODEL):
                self.optimizer[key] = info.nbytes
                continue
            self.infos[key.removeprefix(MODEL)] = info
            held = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
            if held != math.prod(info.shape):
                raise InputError(f"{folder}: {key} is {info}, but {held} of its values are stored")
        if not self.infos:
            raise InputError(f"{folder}: holds no tensor of a model ({MODEL}...), only {sorted(found)[:3]}")

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        tensors = {n: torch.empty(self.infos[n].shape, dtype=self.infos[n].dtype, device="cpu") for n in names}
        read_dcp(self.folder, {MODEL + n: t for n, t in tensors.items()}, alone=True)
        return tensors


def write_store(store: TensorStore, folder: Path, *, done: Callable[[str], None]) -> None:
    """Write all of `store` into `folder` as the model's tensors. Memory: one tensor beside what the store holds."""
    empty = {MODEL + name: info.meta() for name, info in store.infos.items()}
    write_dcp(folder, empty, alone=True, planner=_FillingPlanner(store, done))


class _FillingPlanner(SavePlanner):
    """Plans on tensors of the meta device and reads each when it is written."""

    def __init__(self, store: TensorStore, done: Callable[[str], None]) -> None:
        super().__init__()
        self.store, self.done = store, done

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        name = write_item.index.fqn.removeprefix(MODEL)
        tensor = self.store.read([name])[name].contiguous()
        self.done(name)
        return tensor
