"""Named tensors, wherever they are: on disk, or made from those of another store by a mapping, one group at a time.

Nothing is read before it is asked for; what a store holds (names, shapes, dtypes) is known from the start.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch import Tensor

from trimtab.errors import InputError


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """What is known of a tensor without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def meta(self) -> Tensor:
        """A tensor of this kind that holds nothing."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def info_of(tensor: Tensor) -> TensorInfo:
    """The kind of a tensor."""
    return TensorInfo(shape=tuple(tensor.shape), dtype=tensor.dtype)


def is_left(name: str, leave: Sequence[str]) -> bool:
    """Whether the tensor is to be left behind: one of the globs is its name's."""
    return any(fnmatchcase(name, glob) for glob in leave)


class TensorStore(Protocol):
    """Tensors by name."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """What is in it, in the order in which it is best read."""
        ...

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """These tensors, on the CPU. Raises InputError where they cannot be read."""
        ...


class Step(Protocol):
    """A group of tensors that a mapping takes together."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Names that go in."""
        ...

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those that come out; also of tensors on the meta device."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Made:
    """A step that a function describes; `kept` is the one that gives a tensor as it is."""

    sources: tuple[str, ...]
    run: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def kept(name: str, source: str | None = None) -> Made:
    """The tensor `name`, as it is; or as that of `source` is."""
    source = source or name
    return Made(sources=(source,), run=lambda tensors: {name: tensors[source]})


class Mapped:
    """The tensors that `steps` make of another store's. Holds the last step's results, so memory is that of one step.

    Raises:
        InputError: two steps make one name, or a step cannot take what the store holds.
    """

    def __init__(self, inner: TensorStore, steps: Iterable[Step]) -> None:
        self.inner = inner
        self._step_of: dict[str, Step] = {}
        self.infos: dict[str, TensorInfo] = {}
        self._last: tuple[Step, dict[str, Tensor]] | None = None
        for step in steps:
            made = step.run({name: inner.infos[name].meta() for name in step.sources})
            if twice := sorted(made.keys() & self.infos.keys()):
                raise InputError(f"{twice[0]} is made twice, the second time of {', '.join(step.sources[:3])}")
            self.infos |= {name: info_of(tensor) for name, tensor in made.items()}
            self._step_of |= dict.fromkeys(made, step)

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self._made_by(self._step_of[name])[name] for name in names}

    def sources_of(self, name: str) -> tuple[str, ...]:
        """The inner store's tensors that it is made of."""
        return self._step_of[name].sources

    def _made_by(self, step: Step) -> dict[str, Tensor]:
        if self._last is None or self._last[0] is not step:
            self._last = None  # before the next is read: two steps at once would double the memory
            self._last = step, step.run(self.inner.read(step.sources))
        return self._last[1]


class Digested:
    """A store whose tensors leave their digests when they are read."""

    def __init__(self, inner: TensorStore) -> None:
        self.inner = inner
        self.digests: dict[str, str] = {}

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        return self.inner.infos

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        tensors = self.inner.read(names)
        for name, tensor in tensors.items():
            if name not in self.digests:
                self.digests[name] = digest(name, tensor)
        return tensors

    def finish(self) -> dict[str, str]:
        """Reads what has not been read yet, tensor by tensor; returns all digests."""
        for name in self.infos:
            if name not in self.digests:
                self.read([name])
        return self.digests


def digest(name: str, tensor: Tensor) -> str:
    """SHA-256 over name, dtype, shape and bytes, in hex."""
    whole = hashlib.sha256(f"{name}\n{info_of(tensor)}\n".encode())
    whole.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return whole.hexdigest()


def content_hash(digests: Mapping[str, str]) -> str:
    """One hash over all tensors, whatever their order and the files that they lie in."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"
