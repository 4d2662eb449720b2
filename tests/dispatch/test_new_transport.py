"""A transport from outside: a class and a row in `TRANSPORTS`, and layers run over it with every gradient right."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from trimtab.dispatch.over_group import OverGroup, pack, unpack
from trimtab.dispatch.transport import Handshake, SplitSizes
from trimtab.dispatch.transports import TRANSPORTS
from trimtab.verify.cases import Case
from trimtab.verify.patterns import PATTERNS
from trimtab.verify.run import run_local
from trimtab.verify.topologies import Topology


class PointToPoint(OverGroup):
    """Over sends and receives of each pair of ranks."""

    def handshake(self, message_PC: Tensor) -> Handshake:
        received = self._swap(message_PC, [1] * self.size, [1] * self.size)
        return Handshake(sent=message_PC.tolist(), received=received.tolist(), everyone=[])

    def dispatch(
        self, tensors: Sequence[Tensor], row_token_M: Tensor, splits: SplitSizes, tokens: tuple[int, ...]
    ) -> list[Tensor]:
        return self.combine([t.index_select(0, row_token_M) for t in tensors], splits, tokens)

    def combine(self, tensors: Sequence[Tensor], splits: SplitSizes, tokens: tuple[int, ...]) -> list[Tensor]:
        return unpack(self._swap(pack(tensors), splits.outgoing, splits.incoming), tensors)

    def _swap(self, rows: Tensor, outgoing: Sequence[int], incoming: Sequence[int]) -> Tensor:
        received = rows.new_empty(sum(incoming), rows.shape[1])
        sent, parts = rows.contiguous().split(list(outgoing)), received.split(list(incoming))
        parts[self.rank].copy_(sent[self.rank])
        ops = [
            dist.P2POp(op, part, group=self.group, group_peer=peer)
            for peer in range(self.size)
            for op, part in ((dist.isend, sent[peer]), (dist.irecv, parts[peer])) if peer != self.rank
        ]  # fmt: skip
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return received


@contextlib.contextmanager
def in_the_table() -> Iterator[None]:
    TRANSPORTS["point_to_point"] = PointToPoint
    yield


def test_a_row_in_the_table_is_a_transport() -> None:
    """A plan takes it by name: every pattern, with both ways to combine and with replicated experts."""
    ways: list[dict[str, Any]] = [{}, {"combine": "ordered"}, {"replicas": "replicas"}]
    rows = [Topology(ranks=2, ep=2, transport="point_to_point", **way) for way in ways]
    cases = [Case(topology=row, pattern=pattern, dtype="float64", seed=0) for row in rows for pattern in PATTERNS]
    verdicts = list(run_local(cases, "trimtab", deadline=60.0, around=in_the_table))
    assert [f"{v.case.name}: {v.details[:1]}" for v in verdicts if v.status != "ok"] == []
