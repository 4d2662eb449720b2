"""The cost model of replicated experts: against hand counts, and what it says of the rule over a part of its grid."""

from __future__ import annotations

import pytest
import torch

from benchmarks.replica_model import BOUND, LINKS, Traffic, cells, traffic
from benchmarks.workloads import WORKLOADS
from trimtab.dispatch.options import ReplicationConfig


def test_traffic_of_a_hand_counted_batch() -> None:
    # Two ranks of two experts. Rank 0's tokens take experts 0 and 1, rank 1's tokens 0 and 2: loads 3 + 3 + 0 + 2.
    ids = [torch.tensor([[0, 1], [0, 1], [1, 3]]), torch.tensor([[0, 2]])]
    counts = torch.stack([torch.bincount(i.flatten(), minlength=4) for i in ids])[None]
    plain = traffic(ids, counts, ReplicationConfig(tolerance=2.0, copy_cost=0))
    assert plain == Traffic(slots=6, rows=1, replicas=0, all_copies=0)  # one token each way: [1, 3] and [0, 2]
    exact = traffic(ids, counts, ReplicationConfig(tolerance=0.0, copy_cost=0))
    # Two of expert 0 move to rank 1, where its own token stays; of rank 0's tokens one more goes there.
    assert exact == Traffic(slots=4, rows=2, replicas=1, all_copies=1)
    seconds = Traffic(slots=10, rows=3, replicas=2, all_copies=9).seconds("NVLink", 4, 5)
    assert seconds == pytest.approx(10 * 18 * 20 / 600e12 + (3 * 8 * 4 + 2 * 18 * 20) / 450e9)


@pytest.mark.parametrize(
    ("ranks", "model"), [(2, "Mixtral-8x7B"), (4, "DeepSeek-V3"), (8, "Qwen3-30B"), (8, "gpt-oss-20b")]
)
def test_the_rule_is_never_slower_than_plain_beyond_its_bound(ranks: int, model: str) -> None:
    """The whole grid: `python -m benchmarks replica_model`."""
    found = [cell for workload in WORKLOADS for cell in cells(workload, model, ranks, 1024)]
    assert len(found) == len(WORKLOADS) * len(LINKS)
    assert min(cell.rule for cell in found) >= BOUND
    assert max(cell.rule for cell in found) > 1.1
    assert all(cell.replicas == 0 for cell in found if cell.workload in ("balanced", "random", "spread", "rotating"))
