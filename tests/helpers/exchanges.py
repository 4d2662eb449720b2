"""Calls over real ranks, and what is known of them: the collectives that they issue, and the errors that end them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.facts import Facts
from trimtab.dispatch.host_memory import HostMemory
from trimtab.dispatch.options import ReplicationConfig
from trimtab.dispatch.transport import Handshake, SplitSizes
from trimtab.errors import TrimtabError
from trimtab.experts.module import ExpertMLP

E, K, D, F = 8, 3, 16, 8
EVEN = ReplicationConfig(tolerance=0.0, copy_cost=0)
RULE = ReplicationConfig(copy_cost=2)
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
COLLECTIVES = (
    "all_to_all_single", ALL_GATHER, "all_reduce", "barrier", "broadcast", "all_gather", "all_to_all", "reduce",
    "reduce_scatter_tensor", "gather", "scatter", "send", "recv", "isend", "irecv", "batch_isend_irecv",
    "all_gather_object", "broadcast_object_list", "gather_object",
)  # fmt: skip


@contextmanager
def recorded() -> Iterator[list[str]]:
    """The collectives that this process issues, in order, and its meetings in shared memory: "meet"."""
    calls: list[str] = []

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **named: (calls.append(name), original(*args, **named))[1]

    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            patch.setattr(dist, name, noting(name, getattr(dist, name)))
        patch.setattr(HostMemory, "turn", noting("meet", HostMemory.turn))
        yield calls


class Said(NamedTuple):
    """What a call raised, "nothing" where nothing, and the collectives until then."""

    kind: str
    ranks: tuple[int, ...]
    message: str
    calls: list[str]


def said_of(call: Callable[[], object]) -> Said:
    with recorded() as calls:
        try:
            call()
        except TrimtabError as error:
            return Said(type(error).__name__, error.ranks, str(error), calls)
    return Said("nothing", (), "", calls)


class Layer(nn.Module):
    """Dispatch, real experts, combine; all ranks' experts are drawn alike."""

    def __init__(self, transport: Any, combine: Any, replication: ReplicationConfig | None) -> None:
        super().__init__()
        self.dispatcher = Dispatcher(E, transport, combine=combine, replication=replication, layer="moe")
        m, first = self.dispatcher.experts_per_rank, dist.get_rank() * self.dispatcher.experts_per_rank
        self.experts = ExpertMLP(m, D, F, bias=True, dtype=torch.float64)
        torch.manual_seed(5)
        for param, whole in zip(self.experts.parameters(), ExpertMLP(E, D, F, bias=True).parameters(), strict=True):
            param.data.copy_(whole.detach().normal_()[first : first + m] / 4)

    def forward(self, x: Tensor, ids: Tensor, w: Tensor, mask: Tensor | None) -> Tensor:
        facts = Facts(self.dispatcher.weights_fact(self.experts))
        rows = self.dispatcher._dispatch(x, ids, w, mask, facts=facts)
        own = {"num_slots": rows.num_slots, "replicas": rows.replicas}
        return self.dispatcher.combine(self.experts(rows.x_MD, rows.ids_MK, rows.weights_MK, **own), rows)


class Changed:
    """A transport that on the guilty rank changes what it gathers: counts that peers sent, or that it sends itself."""

    def __init__(self, inner: Any, what: str) -> None:
        self.inner, self.what, self.guard = inner, what, inner.guard
        self.rank, self.size = inner.rank, inner.size

    def handshake(self, message_PC: Tensor) -> Handshake:
        told: Handshake = self.inner.handshake(message_PC)
        return told

    def dispatch(self, tensors: Sequence[Tensor], *args: Any) -> list[Tensor]:
        moved: list[Tensor] = self.inner.dispatch(tensors, *args)
        return moved

    def combine(self, tensors: Sequence[Tensor], splits: SplitSizes, tokens: tuple[int, ...]) -> list[Tensor]:
        counts = tensors[0].dtype == torch.int64
        received: list[Tensor] = self.inner.combine(
            [tensors[0] + 1] if counts and self.what == "sent" else tensors, splits, tokens
        )
        if counts and self.what == "received":
            received[0][(self.rank + 1) % self.size, 0] += 5
        return received
