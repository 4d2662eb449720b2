"""What loads say, and how many numbers of them go to a tracker."""

from __future__ import annotations

import pytest

from trimtab.routing.loads import load_metrics, load_scalars


def test_load_metrics() -> None:
    assert load_metrics([4, 0, 2, 2], dropped=2) == {
        "max_vio": 1.0, "dead_experts": 1, "entropy": pytest.approx(0.75), "drop_rate": 0.2,
        "tokens_per_expert": [4, 0, 2, 2],
    }  # fmt: skip
    assert load_metrics([5, 5, 5])["entropy"] == pytest.approx(1.0)
    nothing = load_metrics([0, 0])
    assert (nothing["max_vio"], nothing["entropy"], nothing["drop_rate"]) == (0, 0, 0)
    assert load_metrics([7])["entropy"] == 0


@pytest.mark.parametrize("layers", [1, 3, 14, 15, 94])
@pytest.mark.parametrize("most_keys", [5, 9, 64])
def test_a_tracker_gets_a_bounded_number_of_keys(layers: int, most_keys: int) -> None:
    records = {str(n): load_metrics([2 + n, 2, 0, 4], dropped=n) for n in range(layers)}
    found = load_scalars(records, most_keys)
    assert len(found) <= most_keys
    vio = [record["max_vio"] for record in records.values()]
    assert (found["loads/max_vio"], found["loads/max_vio_mean"]) == (max(vio), pytest.approx(sum(vio) / layers))
    assert found["loads/dead_experts"] == layers
    assert found["loads/entropy"] == min(record["entropy"] for record in records.values())
    assert found["loads/drop_rate"] == max(record["drop_rate"] for record in records.values())
    single = [int(key.rpartition("/")[2]) for key in found if key.startswith("loads/max_vio/")]
    assert len(single) == min(layers, (most_keys - 5) // 4)
    assert all(found[f"loads/max_vio/{n}"] == vio[n] for n in single)
    if len(single) > 1:
        assert (single[0], single[-1]) == (0, layers - 1)
    assert load_scalars({}) == {}
