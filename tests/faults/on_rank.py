"""One rank of a fault case: two MoE layers, a few steps, and on one rank something that goes wrong.

Legend: T tokens, K experts per token, D model dim, E experts, F expert hidden dim.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function

from faults.cases import Fault
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.facts import MOVEMENT, MOVEMENTS, ROWS
from trimtab.dispatch.options import ReplicationConfig
from trimtab.dispatch.transport import Handshake, SplitSizes, Transport
from trimtab.dispatch.transports import TRANSPORTS
from trimtab.errors import TrimtabError
from trimtab.experts.module import ExpertMLP
from trimtab.guard.guard import Guard

E, K, D, F, T, STEPS = 12, 2, 16, 16, 9, 3


class _Mark(Function):
    """The identity; calls `then` in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Callable[[], None]) -> Tensor:
        ctx.then = then
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        ctx.then()
        return dx, None


class Saboteur:
    """Does what the fault says when the victim comes to its place, and tells the parent when that was."""

    def __init__(self, fault: Fault, rank: int, deadline: float, pipe: Connection) -> None:
        self.fault, self.deadline, self.pipe = fault, deadline, pipe
        self.victim = rank == fault.rank
        self.layer = self.step = -1
        self.done = False

    def wants(self, kind: str, step: int | None = None) -> bool:
        """Whether this rank makes this mistake in the current layer and step (-1: as it is built). Tells the parent."""
        f = self.fault
        due = (f.layer, f.step if step is None else step)
        hit = self.victim and not self.done and f.kind == kind and (self.layer, self.step) == due
        if hit:
            self.done = True
            self.pipe.send({"what": "fault", "at": time.monotonic()})
        return hit

    def at(self, phase: str, direction: str) -> None:
        """The rank is here; the layer is the one it is in."""
        f = self.fault
        if (phase, direction) != (f.phase, f.direction):
            return
        if self.wants("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.wants("freeze"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.wants("raise"):
            raise ValueError("a mistake of the user's")
        if self.wants("stall"):
            time.sleep(self.deadline + 1.5)
        if self.wants("delay"):
            time.sleep(self.deadline / 2)


class Tampered:
    """A transport with a saboteur inside."""

    def __init__(self, inner: Transport, guard: Guard, saboteur: Saboteur) -> None:
        self.inner, self.guard, self.saboteur = inner, guard, saboteur
        self.rank, self.size = inner.rank, inner.size

    def handshake(self, message_PC: Tensor) -> Handshake:
        phase, direction = MOVEMENTS[int(message_PC[0, MOVEMENT])]
        place = self.guard.place()
        assert place is not None
        self.saboteur.layer = int(place.layer.removeprefix("layers."))
        if not self.saboteur.fault.amid:
            self.saboteur.at(phase, direction)
        here = (phase, direction) == (self.saboteur.fault.phase, self.saboteur.fault.direction)
        if here and self.saboteur.wants("wrong_splits"):
            message_PC = message_PC.clone()
            message_PC[(self.rank + 1) % self.size, ROWS] += 1
        return self.inner.handshake(message_PC)

    def dispatch(
        self, tensors: Sequence[Tensor], row_token_M: Tensor, splits: SplitSizes, tokens: tuple[int, ...]
    ) -> list[Tensor]:
        if self.guard.place() is not None and "dispatch forward" in str(self.guard.place()):
            self.saboteur.at("dispatch", "forward")
        self._amid()
        return self.inner.dispatch(tensors, row_token_M, splits, tokens)

    def combine(self, tensors: Sequence[Tensor], splits: SplitSizes, tokens: tuple[int, ...]) -> list[Tensor]:
        self._amid()
        return self.inner.combine(tensors, splits, tokens)

    def _amid(self) -> None:
        """The others know that this rank comes, and are in the movement of what it has."""
        f = self.saboteur.fault
        if f.amid and f"{f.phase} {f.direction}" in str(self.guard.place()):
            self.saboteur.at(f.phase, f.direction)


class Layer:
    """Dispatch, experts, combine, with the mistakes that a rank can make between them."""

    def __init__(self, index: int, transport: Transport, saboteur: Saboteur) -> None:
        f = saboteur.fault
        self.index, self.saboteur = index, saboteur
        saboteur.layer = index
        fingerprint = "hidden 24" if saboteur.wants("fingerprint", step=-1) else "hidden 16"
        name = f"layers.{index}"
        rule = ReplicationConfig(tolerance=0.0, copy_cost=0) if f.replicated else None
        self.dispatcher = Dispatcher(
            E, transport, combine=f.combine, layer=name, fingerprint=fingerprint, replication=rule
        )
        self.experts = ExpertMLP(self.dispatcher.experts_per_rank, D, F)
        self.wide = ExpertMLP(self.dispatcher.experts_per_rank, D + 8, F)

    def __call__(self, x_TD: Tensor) -> Tensor:
        s = self.saboteur
        s.layer = self.index
        if s.wants("skip_layer"):
            return x_TD
        self.dispatcher.begin()
        self._at("route", "forward")
        ids_TK = torch.rand(x_TD.shape[0], E).argsort(1)[:, : K - 1 if s.wants("top_k") else K]
        w_TK = torch.rand(ids_TK.shape)
        experts = self.experts
        if s.wants("width"):
            x_TD, experts = torch.cat((x_TD, x_TD[:, :8]), 1), self.wide
        x_TD = _Mark.apply(x_TD, lambda: self._at("route", "backward"))  # type: ignore[no-untyped-call]
        rows = self.dispatcher.dispatch(x_TD, ids_TK, w_TK[:, :1] if s.wants("bad_shape") else w_TK)
        own = {"num_slots": rows.num_slots, "replicas": rows.replicas}
        self._at("experts", "forward")
        y = experts(rows.x_MD, rows.ids_MK, rows.weights_MK, **own)
        y = _Mark.apply(y, lambda: self._at("experts", "backward"))  # type: ignore[no-untyped-call]
        if s.wants("skip_combine"):
            return x_TD
        if s.wants("combine_rows"):
            y = y[1:]
        if s.wants("dtype"):
            y = y.bfloat16()
        return self.dispatcher.combine(y, rows)[:, :D].to(x_TD.dtype)

    def _at(self, phase: str, direction: str) -> None:
        """Between movements, but where a movement is meant."""
        self.saboteur.layer = self.index
        if not self.saboteur.fault.replicated:
            self.saboteur.at(phase, direction)


def train(fault: Fault, rank: int, deadline: float, pipe: Connection) -> None:
    """The program of every rank."""
    torch.manual_seed(rank)
    saboteur = Saboteur(fault, rank, deadline, pipe)
    guard = Guard(deadline=deadline)
    group = dist.group.WORLD
    assert group is not None
    inner = TRANSPORTS[fault.transport](group, guard=guard)
    layers = [Layer(index, Tampered(inner, guard, saboteur), saboteur) for index in range(2)]
    for step in range(STEPS):
        saboteur.step = step
        x_TD = torch.randn(T + rank, D, requires_grad=True)
        saboteur.layer = fault.layer
        order = layers[::-1] if saboteur.wants("swap_layers") else layers
        if saboteur.wants("extra_call"):
            order = [layers[0], *layers]
        y_TD = x_TD
        for layer in order:
            y_TD = y_TD + layer(y_TD)
        y_TD.square().sum().backward()  # type: ignore[no-untyped-call]


def fault_main(fault: Fault, rank: int, store: str, deadline: float, log: Path, pipe: Connection) -> None:
    """What a rank's process runs. Ends it as the interpreter of a program would end.

    Errors go to `log`: an interpreter that ends with frozen objects has Triton's bindings report each as leaked.
    """
    with log.open("wb") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    gc.freeze()  # what the server imported is not this process's to clear: it would cost a second at the end
    code = 1
    try:
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=fault.ranks, timeout=timedelta(seconds=60)
        )
        train(fault, rank, deadline, pipe)
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except Exception as error:
        named: dict[str, Any] = {"ranks": (), "phase": "", "layer": ""}
        if isinstance(error, TrimtabError):
            named = {"ranks": error.ranks, "phase": error.phase or "", "layer": error.layer or ""}
        said = {"what": "raised", "at": time.monotonic(), "error": type(error).__name__, "message": str(error)}
        pipe.send({**said, **named})
        sys.last_value = error  # as the interpreter does where nobody catches it
        error.__traceback__ = None
    except BaseException:
        traceback.print_exc()
    pipe.close()
    ctypes.pythonapi.Py_Exit(code)
