"""A pack of documents in a transformers model has the losses, loads and gradients of the documents one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import trimtab
from helpers.families import build_model
from trimtab.integrations.transformers import LoadBalancer

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (5, 1, 8, 3)


def eager(family: str) -> Any:
    """In float64, which torch's grouped product does not take."""
    model = build_model(family, dtype=torch.float64).train()
    model.set_experts_implementation("eager")
    return model


def found(model: Any, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    balance = LoadBalancer(model, bias="sign", add_bias=True, aux_loss=0.5, z_loss=0.05)
    with balance.first_pass():
        for batch in batches:
            model(**batch)
    decided = []
    for batch in batches:
        with trimtab.record(model) as recording:
            logits = model(**batch).logits.flatten(0, 1)
        places = batch["position_ids"].flatten()
        inside = places[1:] > 0
        F.cross_entropy(logits[:-1][inside], batch["input_ids"].flatten()[1:][inside], reduction="sum").backward()
        decided.append(recording.decisions().ids[0])
    loads = balance.step()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    biases = {name: b.clone() for name, b in model.named_buffers() if name.endswith("bias")}
    return {"ids": torch.cat(decided), **loads, **balance.losses, **grads, **biases}


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_pack_is_its_documents_one_by_one(family: str) -> None:
    """Of families whose routers compute in the dtype of the model."""
    ids = torch.randint(2, 60, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    places = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    apart = [
        {"input_ids": one, "position_ids": at}
        for one, at in zip(ids.split(LENGTHS, 1), places.split(LENGTHS, 1), strict=True)
    ]
    pack, documents = (
        found(eager(family), batches) for batches in ([{"input_ids": ids, "position_ids": places}], apart)
    )
    assert pack.keys() == documents.keys()
    for name, value in pack.items():
        wanted = documents[name]
        gap = (value - wanted).abs().max() / max(float(wanted.abs().max()), 1.0)
        assert gap <= 1e-12, (name, float(gap))
