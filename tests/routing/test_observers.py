"""Observers by themselves, run by run: balance losses of the experts that ran, loads counted once, what loads say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.routing.loads import load_metrics, load_scalars
from trimtab.routing.observers import BalanceLosses, Loads
from trimtab.routing.port import Port, RouterInfo, RouterRun

CPU = torch.device("cpu")


def ports(*sizes: int) -> dict[str, Port]:
    infos = [RouterInfo(name=str(i), num_experts=size, top_k=2) for i, size in enumerate(sizes)]
    return {info.name: Port(info) for info in infos}


def run_of(port: Port, logits: Tensor, ids: Tensor, real: Tensor | None) -> RouterRun:
    shape = (1, logits.shape[0])
    return RouterRun(
        port, nn.Module(), ids=ids, logits_TE=logits, scores=lambda: logits.softmax(-1), shape=shape, real=lambda: real
    )


@pytest.mark.parametrize("padded", [False, True])
def test_the_balance_loss_is_of_the_experts_that_ran(padded: bool) -> None:
    """E * K * sum of f * p, the mean over the layers: f of what a selection bias has chosen here, without padding."""
    torch.manual_seed(0)
    logits = [torch.randn(16, 6, requires_grad=True), torch.randn(16, 8, requires_grad=True)]
    ids = [(one + 3 * torch.randn(one.shape[1])).topk(2).indices for one in logits]
    real = torch.rand(16) < 0.6 if padded else torch.ones(16, dtype=torch.bool)
    truth = [
        one.shape[1]
        * (i[real].flatten().bincount(minlength=one.shape[1]) / real.sum() * one.softmax(-1)[real].mean(0)).sum()
        for one, i in zip(logits, ids, strict=True)
    ]
    found, losses = ports(6, 8), BalanceLosses(aux_loss=1.0, z_loss=0.0, group=lambda: None)
    losses.begin({name: port.info for name, port in found.items()}, CPU)
    runs = [
        run_of(port, *each, real if padded else None) for port, *each in zip(found.values(), logits, ids, strict=True)
    ]
    seen = [losses.see(run) for run in runs]
    total: Tensor = sum(seen[1:], seen[0])  # type: ignore[assignment, arg-type]
    wanted = torch.stack(truth).mean()
    torch.testing.assert_close(total, wanted)
    torch.testing.assert_close(losses.values["global_aux"], wanted.detach())
    theirs = torch.autograd.grad(wanted, logits, retain_graph=True)
    for ours, true in zip(torch.autograd.grad(total, logits), theirs, strict=True):
        torch.testing.assert_close(ours, true)


def test_an_even_load_costs_top_k_and_scores_have_no_z_loss() -> None:
    even, (port,) = 5.0 * torch.eye(4).repeat(3, 1).requires_grad_(), ports(4).values()
    losses = BalanceLosses(aux_loss=1.0, z_loss=0.0, group=lambda: None)
    losses.begin({"0": port.info}, CPU)
    torch.testing.assert_close(losses.see(run_of(port, even, (even + even.roll(1, 1)).topk(2).indices, None)),
                               torch.tensor(2.0))  # fmt: skip
    given = RouterInfo(name="0", num_experts=4, top_k=2, score="given")
    with pytest.raises(ConfigError, match="gives scores"):
        BalanceLosses(aux_loss=0.0, z_loss=0.1, group=lambda: None).begin({"0": given}, CPU)


def test_loads_are_of_real_tokens_that_train_and_begin_anew() -> None:
    found, loads = ports(4, 3), Loads()
    loads.begin({name: port.info for name, port in found.items()}, CPU)
    ids = torch.tensor([[0, 1], [0, 2], [2, -1]])  # expert 1 had no room for the last slot
    for port in found.values():
        logits = torch.zeros(3, port.info.num_experts, requires_grad=True)
        run = run_of(port, logits, ids, torch.tensor([True, False, True]))
        run.chosen_E = run.kept_E.clone().index_fill(0, torch.tensor(1), 2)
        loads.see(run)
        with torch.no_grad():
            loads.see(run_of(port, logits, ids, None))
        loads.see(run)
    assert loads.records(times=2) == {"0": load_metrics([1, 1, 1, 0], 1), "1": load_metrics([1, 1, 1], 1)}
    assert not any(load.any() for load in loads.take().values())


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
