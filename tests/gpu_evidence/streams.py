"""Streams of a GPU on the CPU: PyTorch's checker of races, told of tensors as if they were on a device, of streams and
of events, whose order nothing else enforces here. A backward runs on the stream that it is called on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.cuda._sanitizer import EventHandler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpu_evidence.fake_cuda import place
from trimtab.operators import KERNELS


class Streams(TorchDispatchMode):
    """races: the line of ours, or "?", and the operator of each access that no event orders behind an earlier one.
    unkept: the same of each first use of memory on another stream than it was made on, with no `record_stream`."""

    def __init__(self) -> None:
        super().__init__()
        self.handler, self.numbers = EventHandler(), count()
        self.races: list[str] = []
        self.used: dict[tuple[int, int], str] = {}
        self.home: dict[int, int] = {}
        self.kept: set[tuple[int, int]] = set()
        self.alive: list[Any] = []  # an address is one tensor's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in KERNELS:
            with self:
                return KERNELS[func](*args, **kwargs)
        named = dict(zip((arg.name for arg in func._schema.arguments), args, strict=False)) | kwargs
        writes = [arg.name for arg in func._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
        writes += list(named)[: func.namespace == "c10d"]  # whose schemas do not say it
        given, written = self.keys(named), self.keys([named.get(name) for name in writes])
        out = func(*args, **kwargs)
        written |= self.keys(out) - given
        views = {func.namespace == "aten" and any(a.alias_info for a in func._schema.arguments) and not writes}
        read = set() if True in views else given - written
        stream, what = torch.cuda.current_stream().number, f"{place()} {func.name()}"
        for key in read | written:
            home = self.home.setdefault(key, stream)
            if home != stream:
                self.used.setdefault((key, stream), what)
        aliases = {key: [""] for key in read | written}
        found = self.handler._handle_kernel_launch(stream, read, written, self.keys(out), func.name(), aliases)
        self.races += [what] * len(found)
        return out

    def keys(self, tree: Any) -> set[int]:
        """Of memory."""
        tensors = [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.nbytes]
        self.alive += [t.untyped_storage() for t in tensors]
        return {t.untyped_storage().data_ptr() for t in tensors}

    @property
    def unkept(self) -> list[str]:
        return [what for use, what in self.used.items() if use not in self.kept]


@contextmanager
def streams(monkeypatch: Any) -> Iterator[Streams]:
    """Within, torch.cuda's streams and events are those of a checker that sees all operators."""
    check = Streams()

    class Event:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.number = next(check.numbers)
            check.handler._handle_event_creation(self.number)

        def record(self, stream: Any = None) -> None:
            check.handler._handle_event_record(self.number, (stream or stack[-1]).number)

    class Stream:
        device = torch.device("cpu")

        def __init__(self, *args: Any) -> None:
            self.number = next(check.numbers)
            check.handler._handle_stream_creation(self.number)

        def record_event(self) -> Event:
            event = Event()
            event.record(self)
            return event

        def wait_event(self, event: Event) -> None:
            check.handler._handle_event_wait(event.number, self.number)

        def wait_stream(self, other: Any) -> None:
            self.wait_event(other.record_event())

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        stack.append(stream)
        yield
        stack.pop()

    stack = [Stream()]
    for name, value in {"Event": Event, "Stream": Stream, "stream": on}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stack[-1])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    keep = lambda t, stream: check.kept.update((key, stream.number) for key in check.keys(t))  # noqa: E731
    monkeypatch.setattr(Tensor, "record_stream", keep)
    with check:
        yield check
