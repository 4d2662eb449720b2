"""A model that lies over ranks, written by one of them as one process writes a whole one: nobody gathers it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.dynamic_module_utils import custom_object_save

from trimtab.checkpoint.ranks import on_every_rank, on_first_rank
from trimtab.checkpoint.state import plain_name, unwrapped
from trimtab.convert.files import SHARD_BYTES, parts, planned, write_safetensors
from trimtab.convert.source import ties, without
from trimtab.convert.steps import saved_mapping_of, saving_steps
from trimtab.convert.tensors import Mapped, TensorStore, bits, infos_of
from trimtab.experts.quantized import MARK


class LiveModel(TensorStore):
    """Parameters and persistent buffers. One rank has `write`: it reads them, on the CPU, and the others send what it
    lacks of what it asks for, and read tensors of the meta device. All ranks must read the same, in one order."""

    def __init__(self, model: Any, *, write: bool) -> None:
        self._state = {plain_name(name): tensor.detach() for name, tensor in unwrapped(model).state_dict().items()}
        self.infos, self._write, self._rank = infos_of(self._state), write, 0
        held = {n: _boxes(t) for n, t in self._state.items() if isinstance(t, DTensor) and t.dim() and _is_regular(t)}
        everyone: list[Any] = [(write, held)]
        if dist.is_initialized():
            everyone, self._rank = [None] * dist.get_world_size(), dist.get_rank()
            dist.all_gather_object(everyone, (write, held))
        self._writer = next(rank for rank, (writes, _) in enumerate(everyone) if writes)
        self._owner: dict[str, dict[Any, int]] = {}  # of each part, (offsets, sizes)
        for name in held:
            ranks = [*reversed(range(len(everyone))), self._writer]  # of several that hold a part one sends it
            parts = {box: rank for rank in ranks for box in everyone[rank][1].get(name, ())}
            if sum(math.prod(sizes) for _, sizes in parts) == self._state[name].numel():
                self._owner[name] = parts

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {n: self.read_rows(n, slice(0, *self.infos[n].shape[:1])) for n in names}

    def read_rows(self, name: str, rows: slice) -> Tensor:
        tensor, info, device = self._state[name], self.infos[name], "cpu" if self._write else "meta"
        if self._whole is not None and self._whole[0] != name:
            self._whole = None
        if name not in self._owner:
            if isinstance(tensor, DTensor):  # gathered once for all its rows
                self._whole = self._whole or (name, tensor.full_tensor())
            whole = tensor if self._whole is None else self._whole[1]
            return (whole[rows] if info.shape else whole).to(device)
        out = torch.empty(rows.stop - rows.start, *info.shape[1:], dtype=info.dtype, device=device)
        for (offsets, sizes), owner in self._owner[name].items():
            first, last = max(rows.start, offsets[0]), min(rows.stop, offsets[0] + sizes[0])
            where = [slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)][1:]
            if first < last and self._rank in (owner, self._writer):
                part = out[(slice(first - rows.start, last - rows.start), *where)]
                local = tensor.to_local()[first - offsets[0] : last - offsets[0]] if self._rank == owner else None
                if local is None:
                    local = torch.empty(part.shape, dtype=part.dtype, device=tensor.to_local().device)
                    dist.recv(bits(local), owner)
                elif not self._write:
                    dist.send(bits(local), self._writer)
                part.copy_(local)
        return out


def _boxes(tensor: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    chunks = tensor.__create_chunk_list__()  # as torch.distributed.checkpoint asks
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]


def _is_regular(tensor: DTensor) -> bool:
    """True if a rank's part is one box: a strided shard is one where the mesh's later dims have split it before."""
    mesh, placements = tensor.device_mesh, tensor.placements
    for i, placement in enumerate(placements):
        later = (mesh.size(j) for j in range(i + 1, mesh.ndim) if placements[j].is_shard(getattr(placement, "dim", -1)))
        if placement.is_partial() or getattr(placement, "split_factor", 1) not in (1, math.prod(later)):
            return False
    return True


def send_all(store: TensorStore, shard_bytes: int | str = SHARD_BYTES) -> None:
    """The part of the ranks that do not write, while one calls `write_safetensors` for the store of a `LiveModel`, and
    with the same `shard_bytes`. It may write other tensors behind those of the store."""
    deque(chain.from_iterable(parts(store, planned(store, shard_bytes))), maxlen=0)


def save_pretrained(model: Any, folder: Path | str, *, max_shard_size: int | str = "50GB") -> None:
    """Write what `model.save_pretrained(folder)` writes of a whole model in one process, with the same bytes; several
    files divide the tensors one by one. Every rank must call; rank 0 writes. Weights of an earlier save are removed.

    Beside its own shard a rank holds a block of one parameter's rows, where transformers gathers each parameter on
    every rank and all of them on rank 0. What peft or a quantizer of transformers is part of is saved by transformers.
    Raises InputError, on every rank, where the folder cannot be made or a file not be written.
    """
    model, folder, write = unwrapped(model), Path(folder), not dist.is_initialized() or dist.get_rank() == 0
    coded = any(getattr(module, name, None) for module in model.modules() for name in (MARK, "hf_quantizer"))
    if coded or hasattr(model, "peft_config"):
        on_first_rank(lambda: folder.mkdir(parents=True, exist_ok=True), None)
        save = partial(model.save_pretrained, max_shard_size=max_shard_size, is_main_process=write)
        on_every_rank(lambda: save(folder), None)
        return
    model.config.dtype, model.config.architectures = model.dtype, [type(model).__name__.removeprefix("FSDP")]

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if model.is_remote_code():  # with the files that define it
            custom_object_save(model, folder, config=model.config)
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)

    on_first_rank(begin, None)
    live, mapping = LiveModel(model, write=write), getattr(model, "_weight_conversions", None)
    state = without(live, (name for name, shared in ties(model).items() if shared in live.infos))
    saved = Mapped(state, saving_steps(model, saved_mapping_of(model) if mapping is None else mapping, state))
    facts = {"shard_bytes": max_shard_size, "total_parameters": model.num_parameters(), "read_on": True}
    act = partial(write_safetensors, saved, folder, **facts) if write else partial(send_all, saved, max_shard_size)
    on_every_rank(act, None)
