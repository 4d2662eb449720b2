"""One watcher of routers: whoever looks, each decision is read and counted once, in compiled models too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from helpers.balance_ranks import batches
from helpers.families import build_model
from trimtab.decisions import record
from trimtab.integrations.transformers import LoadBalancer
from trimtab.integrations.transformers.routers.find import find_routers, watch
from trimtab.integrations.transformers.routers.loads import RouterLoads

pytestmark = pytest.mark.usefixtures("one_thread")


def batch(micro: int = 0) -> dict[str, Tensor]:
    ids, mask = batches()[0][micro]
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("recompute", ["", "reentrant", "saved tensors"])
def test_all_who_look_count_once(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("qwen3_moe").train()
    if recompute:
        model.activation_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
        model.enable_input_require_grads()
    counted: list[int] = []
    count_ids = watch.count_ids
    monkeypatch.setattr(watch, "count_ids", lambda *args: counted.append(1) or count_ids(*args))
    balance, loads = LoadBalancer(model, add_bias=True), RouterLoads(model)
    for micro in range(2):
        with record(model) as recording:
            loss = model(**batch(micro)).loss
        loss.backward()
        real = batch(micro)["attention_mask"].bool()
        decisions = recording.decisions()
        wanted = {name: decisions.ids[:, :, i][real] for i, name in enumerate(decisions.layers)}
        assert len(counted) == 2 * (micro + 1), "once for each router and forward"
        assert loads.split(loads.take_all()[:-2].tolist()) == {
            name: ids.flatten().bincount(minlength=8).tolist() for name, ids in wanted.items()
        }
    tokens = sum(int(batch(micro)["attention_mask"].sum()) for micro in range(2))
    assert [int(load.sum()) for load in balance.step().values()] == [2 * tokens] * 2
    with record(model.eval()) as recording:
        model(**batch()).loss.backward()
        with torch.no_grad():
            model.train()(**batch())
    assert recording.decisions(1).ids.shape == (4, 12, 2, 2), "a recording has what is evaluated"
    assert not any(load.any() for load in balance.step().values())
    assert not loads.take_all().any()
    balance.remove()
    loads.remove()
    assert not [place for place in find_routers(model) if "forward" in vars(place.module)]
    assert not model._forward_pre_hooks


OPTIONS: dict[str, Any] = {"rate": 0.05, "add_bias": True, "aux_loss": 0.5, "z_loss": 0.05}


def balanced(model: Any, run: Any) -> dict[str, Any]:
    """Two steps of two micro-batches, all on."""
    balance, loads = LoadBalancer(model, **OPTIONS), RouterLoads(model)
    found: dict[str, Any] = {}
    for step in range(2):
        model.zero_grad()
        for micro in range(2):
            run(**batch(micro)).loss.backward()
        found |= {f"{step} {name}": load for name, load in balance.step().items()}
        found |= {f"{step} {name}": value for name, value in balance.losses.items()}
        found[f"{step} loads"] = loads.take_all()
    found |= {name: b.clone() for name, b in model.named_buffers() if name.endswith("selection_bias")}
    found |= {name: p.grad.clone() for name, p in model.named_parameters()}
    balance.remove()
    loads.remove()
    return found


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
def test_compiled(behind: bool) -> None:
    """Put on before a model is compiled; and behind that, when its graphs have run already."""
    torch.compiler.reset()
    model = build_model("qwen3_moe").train()
    wanted = balanced(model, model)
    for place in find_routers(model):
        place.module.selection_bias.zero_()
    counters.clear()
    if behind:
        model.compile(backend="aot_eager")
        model(**batch()).loss.backward()
        assert counters["stats"]["unique_graphs"] == 1
        found = balanced(model, model)
    else:
        found = balanced(model, torch.compile(model, backend="aot_eager"))
    assert counters["stats"]["unique_graphs"] > 1
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
    torch.compiler.reset()
