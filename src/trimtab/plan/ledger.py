"""A ledger of memory: the birth, the death, the size, the operator and the phase of every storage, real or fake.

It sees operators, of ours also what is made inside, and `UntypedStorage.resize_`, by which FSDP2 takes memory.
What a storage is for is asked afterwards: what becomes a gradient or a moment is known by then, from optimizers' steps.
A time is the number of births and deaths before it, so no two of these fall together.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from trimtab.kernels.choose import name_of
from trimtab.operators import KERNELS

CATEGORIES = ("weights", "gradients", "moments", "activations", "exchange", "copies", "gathered", "other")
TRAVELS = dict.fromkeys(("alltoall", "all_to_all"), "exchange")
TRAVELS |= dict.fromkeys(("allgather", "all_gather", "reduce_scatter"), "gathered")
"""Categories of what travels, by parts of names of operators."""
FORWARD = "forward"
"""How phases begin that leave activations."""


@dataclass(eq=False, slots=True)
class Storage:
    """size: as it counts, 0 for one that was there before; nbytes: as it is. born, died: times; died is None while it
    lives. phase: the number of the phase. known: the category that it was said to be of, or ""."""

    size: int
    nbytes: int
    born: int
    operator: str
    phase: int
    known: str = ""
    died: int | None = None


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages that operators return while it is entered; on fake tensors it is entered inside their mode.

    now: bytes alive. `peak`, `categories` and `biggest` look back. phases: each with the time of its begin. calls: the
    time and the name of each operator's. flops: of all operators that PyTorch has a formula for. moved: bytes that each
    collective was given, by its name and its ranks.

    Args:
        rounding: sizes are rounded up to multiples of so many bytes, as an allocator does.
        kernels: for tensors without values, the backend that operators of experts run by inside, of a name.
        holds: the bytes that an operator holds beside what is seen, by the operator and its arguments.
    """

    def __init__(self, rounding: int = 1, kernels: Any = None, holds: Callable[..., int] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.storages: list[Storage] = []
        self._alive: list[int] = []  # bytes, by time
        self.phases: list[tuple[str, int]] = [("", 0)]
        self.calls: list[tuple[int, str]] = []
        self.moved: Counter[str] = Counter()
        self._living: dict[int, Storage] = {}
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._rounding, self._kernels, self._holds = rounding, kernels and cache(kernels), holds
        self.flops = self._depth = 0
        self._paused = False
        self._undo = ExitStack()

    @property
    def clock(self) -> int:
        return len(self._alive)

    @property
    def phase(self) -> str:
        """What is going on, for storages that are born."""
        return self.phases[-1][0]

    @phase.setter
    def phase(self, name: str) -> None:
        self.phases.append((name, self.clock))

    def know(self, tensors: Iterable[Tensor | None], category: str = "") -> None:
        """Say what tensors are for. Those that were there before are counted from then on, if of a category."""
        for tensor in tensors:
            if tensor is not None:
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                storage = self._meet(local, "", counts=False)
                if storage is not None and category:
                    storage.known = category
                    if not storage.size:
                        self._resized(local.untyped_storage(), "", again=True)

    def peak(self, since: int = 0, until: int | None = None) -> tuple[int, int]:
        """The most bytes alive between two times, and when that was first."""
        first, last = max(since - 1, 0), self.clock if until is None else until
        at = max(range(first, max(last, first + 1)), key=lambda time: self._alive[time]) if self._alive else 0
        return self._alive[at] if self._alive else 0, at

    def categories(self, at: int) -> dict[str, int]:
        """Bytes alive at a time, by what they are for."""
        return dict(zip(CATEGORIES, self.by_category()[at].tolist(), strict=True))

    def by_category(self) -> Tensor:
        """Bytes alive, [time, category] int64."""
        changes = torch.zeros(self.clock + 1, len(CATEGORIES), dtype=torch.int64)
        column = torch.tensor([CATEGORIES.index(self.category(s)) for s in self.storages])
        size = torch.tensor([s.size for s in self.storages])
        died = torch.tensor([self.clock if s.died is None else s.died for s in self.storages])
        changes.index_put_((torch.tensor([s.born for s in self.storages]), column), size, accumulate=True)
        changes.index_put_((died, column), -size, accumulate=True)
        return changes[:-1].cumsum(0)

    def biggest(self, at: int, count: int = 10) -> list[Storage]:
        return sorted((s for s in self.storages if s.born <= at < (s.died or at + 1)), key=lambda s: -s.size)[:count]

    def category(self, storage: Storage) -> str:
        """As it was said to be, or else of the operator that made it; what a forward leaves are activations."""
        if storage.known or "_to_copy" in storage.operator:
            return storage.known or "copies"
        if not self.phases[storage.phase][0].startswith(FORWARD):
            return "other"
        after = next((at for name, at in self.phases[storage.phase :] if not name.startswith(FORWARD)), self.clock)
        return "activations" if storage.died is None or storage.died >= after else "other"

    def __enter__(self) -> Any:
        """Also see what no operator does: FSDP2's way to take memory, and not what DTensor only tries out."""
        if not self._depth:
            self._instead(torch.UntypedStorage, "resize_", self._resize)
            self._instead(ShardingPropagator, "_propagate_tensor_meta_non_cached", self._unseen)
            for hook in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
                self._undo.callback(hook(self._stepped).remove)
        self._depth += 1
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if not self._depth:
            self._undo.close()

    def _instead(self, of: Any, name: str, by: Callable[..., Any]) -> None:
        own = getattr(of, name)
        self._undo.enter_context(patch.object(of, name, lambda *args: by(own, *args)))

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Before a step of an optimizer, which may free gradients, and behind it, when moments are there."""
        self.know((p.grad for group in optimizer.param_groups for p in group["params"]), "gradients")
        states = (value for state in optimizer.state.values() for value in state.values())
        self.know((value for value in states if isinstance(value, Tensor)), "moments")

    def _resize(self, own: Callable[..., Any], held: torch.UntypedStorage, size: int) -> Any:
        done = own(held, size)
        self._resized(held, "resize_", "gathered")
        return done

    def _unseen(self, own: Callable[..., Any], *args: Any) -> Any:
        with patch.object(self, "_paused", True):
            return own(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # of DTensors and results under way: what they wrap comes by itself
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        given, name, schema = [*_tensors((args, kwargs))], str(func), func._schema
        self.calls.append((self.clock, name))
        lent = func is torch.ops.aten.resize_.default  # memory of a `HostBufferPool`, on its way out
        for tensor in given:
            self._meet(tensor, name, counts=lent)
        result = self._run(func, schema, args, kwargs)
        if func.overloadpacket in flop_registry and self._depth == 1:
            self.flops += int(flop_registry[func.overloadpacket](*args, **kwargs, out_val=result))
        made = [*_tensors(result)]
        for tensor in made:
            self._meet(tensor, name)
        travels = next((kind for part, kind in TRAVELS.items() if part in name), "")
        for tensor in given if schema.is_mutable else ():
            self._resized(tensor.untyped_storage(), name)
        for tensor in (*given, *made) if travels else ():
            if storage := self._living.get(_key(tensor.untyped_storage())):
                storage.known = storage.known or travels
        if name.startswith("c10d."):
            ranks = next((dist.ProcessGroup.unbox(a).size() for a in args if isinstance(a, torch.ScriptObject)), 1)
            self.moved[f"{name.split('.')[1]} of {ranks}"] += max((t.nbytes for t in given), default=0)
        if self._holds is not None and (held := self._holds(func, args)):
            self._die(self._born(held, held, name, travels))
        return result

    def _run(self, func: Any, schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Of our operators, also what they make inside; without values, where they read none."""
        if func not in KERNELS:
            return func(*args, **kwargs)
        given = list(args)
        for i in [i for i, of in enumerate(schema.arguments[: len(args)]) if of.name == "kernels" and self._kernels]:
            given[i] = args[i] if args[i].startswith("@") else name_of(self._kernels(args[i]))
        try:
            with self:
                return KERNELS[func](*given, **kwargs)
        except DataDependentOutputException:
            return func(*args, **kwargs)

    def _meet(self, tensor: Tensor, name: str, counts: bool = True) -> Storage | None:
        """Enter a tensor's storage if it is new. counts: as born now, else as there before."""
        if tensor.is_meta:
            return None
        held = tensor.untyped_storage()
        key = _key(held)
        if key not in self._living:
            size = held.nbytes()
            self._living[key] = self._born(size, size if counts else 0, name)
            self._refs[key] = weakref.ref(held, lambda _: self._gone(key))
        return self._living[key]

    def _gone(self, key: int) -> None:
        del self._refs[key]
        self._die(self._living.pop(key))

    def _resized(self, held: torch.UntypedStorage, name: str, known: str = "", *, again: bool = False) -> None:
        """A storage of another size is another one."""
        key, size = _key(held), held.nbytes()
        before = self._living.get(key)
        if before is not None and (again or before.nbytes != size):
            self._die(before)
            self._living[key] = self._born(size, size, name, before.known or known)

    def _born(self, nbytes: int, counted: int, name: str, known: str = "") -> Storage:
        size = -(-counted // self._rounding) * self._rounding
        storage = Storage(size, nbytes, self.clock, name, len(self.phases) - 1, known)
        self.storages.append(storage)
        self._count(size)
        return storage

    def _die(self, storage: Storage) -> None:
        storage.died = self.clock
        self._count(-storage.size)

    def _count(self, size: int) -> None:
        self.now += size
        self._alive.append(self.now)


def _key(held: torch.UntypedStorage) -> int:
    return int(held._cdata)


def _tensors(of: Any) -> Iterator[Tensor]:
    """The tensors in what an operator takes or returns."""
    if isinstance(of, Tensor):
        yield of
    elif isinstance(of, list | tuple | dict):
        for each in of.values() if isinstance(of, dict) else of:
            yield from _tensors(each)
