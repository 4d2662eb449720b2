"""Named tensors, on disk or made from those of another store, one group at a time.

Names, shapes and dtypes are known from the start; values are read when they are asked for.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import InputError

BLOCK_BYTES = 1 << 22
"""Of a tensor that is read, hashed or written by rows."""


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Shape and dtype, known without reading the tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def meta(self) -> Tensor:
        """A tensor of this kind on the meta device."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class TensorStore:
    """Tensors by name. infos: name -> info, in the order in which the tensors are best read."""

    infos: Mapping[str, TensorInfo]
    _whole: tuple[str, Tensor] | None = None

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """These tensors, on the CPU. Raises InputError where they cannot be read."""
        raise NotImplementedError

    def read_rows(self, name: str, rows: slice) -> Tensor:
        """Rows of one tensor; here of the whole one, which is kept until rows of another are asked for."""
        if self._whole is None or self._whole[0] != name:
            self._whole = None
            self._whole = name, self.read([name])[name]
        return self._whole[1][rows]

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The tensor in blocks of rows, of `BLOCK_BYTES` or one row."""
        info = self.infos[name]
        if info.nbytes <= BLOCK_BYTES:
            yield self.read([name])[name]
            return
        step = max(1, BLOCK_BYTES * info.shape[0] // info.nbytes)
        for row in range(0, info.shape[0], step):
            yield self.read_rows(name, slice(row, min(row + step, info.shape[0])))


@dataclass(frozen=True, eq=False)
class Step:
    """A group of tensors that a mapping takes together. `run` is also called with tensors on the meta device.

    by_rows: rows of what it makes are made of the same rows of its sources, or of the whole sources in these rows of
    `stack`, if it has one.
    rows, made: what it makes, of these rows of its one source alone.
    """

    sources: tuple[str, ...]
    run: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    by_rows: bool = False
    stack: Sequence[Sequence[str]] = ()
    rows: slice | None = None
    made: Mapping[str, TensorInfo] | None = None


def kept(name: str, source: str | None = None) -> Step:
    """The step that gives the tensor `source` (by default of the same name) unchanged, under the name `name`."""
    source = source or name
    return Step((source,), lambda tensors: {name: tensors[source]}, by_rows=True)


class Mapped(TensorStore):
    """The tensors that `steps` make of another store's, run when they are read. Keeps the last step's results alone.

    Raises:
        InputError: two steps make one name, or a step cannot take what the store holds.
    """

    def __init__(self, inner: TensorStore, steps: Iterable[Step]) -> None:
        self.inner = inner
        self._step_of: dict[str, Step] = {}
        self.infos: dict[str, TensorInfo] = {}
        self._last: tuple[Step, dict[str, Tensor]] | None = None
        for step in steps:
            made = step.made or infos_of(step.run({name: inner.infos[name].meta() for name in step.sources}))
            if twice := sorted(made.keys() & self.infos.keys()):
                raise InputError(f"{twice[0]} is made twice, the second time of {', '.join(step.sources[:3])}")
            self.infos |= made
            self._step_of |= dict.fromkeys(made, step)

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self._made_by(self._step_of[name])[name] for name in names}

    def read_rows(self, name: str, rows: slice) -> Tensor:
        step = self._step_of[name]
        if not step.by_rows:
            return super().read_rows(name, rows)
        if step.stack:
            return step.run(self.inner.read([source for row in step.stack[rows] for source in row]))[name]
        return step.run({source: self.inner.read_rows(source, rows) for source in step.sources})[name]

    def sources_of(self, name: str) -> tuple[str, ...]:
        """The inner store's tensors that it is made of."""
        return self._step_of[name].sources

    def _made_by(self, step: Step) -> dict[str, Tensor]:
        if self._last is None or self._last[0] is not step:
            self._last = None  # before the next is read: two steps at once would double the memory
            if step.rows is None:
                tensors = self.inner.read(step.sources)
            else:
                tensors = {name: self.inner.read_rows(name, step.rows) for name in step.sources}
            self._last = step, step.run(tensors)
        return self._last[1]


class Hashed(TensorStore):
    """Takes the SHA-256 (name, dtype, shape, bytes) of every tensor that is read through it, whole or row after row."""

    def __init__(self, inner: TensorStore) -> None:
        self.inner, self.infos = inner, inner.infos
        self.hashes: dict[str, str] = {}
        self._begun: dict[str, tuple[Any, int]] = {}  # by name, of how many rows

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        tensors = self.inner.read(names)
        for name, tensor in tensors.items():
            self._take(name, tensor, slice(0, *(self.infos[name].shape[:1] or (1,))))
        return tensors

    def read_rows(self, name: str, rows: slice) -> Tensor:
        tensor = self.inner.read_rows(name, rows)
        self._take(name, tensor, rows)
        return tensor

    def finish(self, done: Callable[[str], None] = lambda name: None) -> dict[str, str]:
        """All hashes; reads the tensors that have not been read to their end, one by one."""
        for name in self.infos:
            if name not in self.hashes:
                deque(self.blocks(name), maxlen=0)
            done(name)
        return self.hashes

    def _take(self, name: str, tensor: Tensor, rows: slice) -> None:
        info = self.infos[name]
        begun = hashlib.sha256(f"{name}\n{info}\n".encode()), 0
        taken, row = begun if rows.start == 0 else self._begun.get(name, begun)
        if name in self.hashes or row != rows.start:
            return
        taken.update(bits(tensor.detach()).numpy().data)
        self._begun[name] = taken, rows.stop
        if not info.shape or rows.stop == info.shape[0]:
            self.hashes[name] = self._begun.pop(name)[0].hexdigest()


def content_hash(hashes: Mapping[str, str]) -> str:
    """One hash over all tensors, whatever their order and the files that they lie in."""
    lines = "".join(f"{name} {hashes[name]}\n" for name in sorted(hashes))
    return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's values, flat."""
    return tensor.contiguous().flatten().view(torch.uint8)


def infos_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    """Shapes and dtypes of tensors, by name."""
    return {name: TensorInfo(shape=tuple(t.shape), dtype=t.dtype) for name, t in tensors.items()}
