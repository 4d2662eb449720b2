"""What inference engines return, laid out in batches: each token trains as in its sample alone, with its experts."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers import rollouts
from helpers.forced_routers import forced
from helpers.rollouts import LENGTHS, MOE, NAMES, E, K
from trimtab.errors import ConfigError, InputError
from trimtab.integrations.transformers.routers.find import find_routers
from trimtab.integrations.transformers.routers.observe import replay, rollout_decisions
from trimtab.integrations.transformers.routers.rules import UNREACHABLE
from trimtab.moe import MoEConfig
from trimtab.routing.config import RouterConfig

pytestmark = pytest.mark.usefixtures("one_thread")

N, L = len(LENGTHS), 10


def padded(side: str) -> tuple[Tensor, Tensor]:
    """(input_ids, attention_mask) [B, L]."""
    ids, mask = torch.zeros(N, L, dtype=torch.long), torch.zeros(N, L, dtype=torch.long)
    for i, sample in enumerate(rollouts.tokens()):
        at = slice(L - len(sample), L) if side == "left" else slice(0, len(sample))
        ids[i, at], mask[i, at] = sample, 1
    return ids, mask


def alone(model: Any, samples: list[Tensor], starts: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Logits of each sample by itself, its routers forced by their own code, and gradients of their squares."""
    routers = {place.name: place.module for place in find_routers(model)}
    logits = []
    model.zero_grad()
    for tokens, sample, start in zip(rollouts.tokens(), samples, starts, strict=True):
        with forced(routers, rollouts.whole(sample, len(tokens), start), E):
            logits.append(model(input_ids=tokens[None]).logits[0])
        logits[-1].square().mean().backward()
    return [t.detach() for t in logits], [p.grad.clone() for p in model.parameters()]


def compare(model: Any, samples: list[Any], starts: list[int], batch: dict[str, Tensor], **layout: Any) -> None:
    """A batch under `replay`, against its samples one by one."""
    true, grads = alone(model, samples, starts)
    decisions = rollout_decisions(model, samples, start_len=starts, **layout)
    model.zero_grad()
    with replay(model, decisions):
        logits = model(**batch).logits
    mask = layout.get("attention_mask")
    rows = list(logits[0].split(LENGTHS)) if mask is None else [logits[i][mask[i] != 0] for i in range(N)]
    sum(row.square().mean() for row in rows).backward()  # type: ignore[union-attr]
    for ours, wanted in zip(rows, true, strict=True):
        assert (ours - wanted).abs().max() <= 1e-12 * wanted.abs().max()
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert (p.grad - grad).abs().max() <= 1e-12 * max(1.0, float(grad.abs().max()))
    for place in find_routers(model):
        assert place.module.weight.grad.abs().max() > 0


@pytest.mark.parametrize("case", ["whole", "prefix cut", "holes", "one without a record"])
@pytest.mark.parametrize("layout", ["left", "right", "packed", "packed and padded"])
def test_each_token_trains_as_in_its_sample_alone(layout: str, case: str) -> None:
    model, samples, starts = rollouts.build(), rollouts.records(), [0] * N
    if case == "prefix cut":
        starts = [2, 0, 4]
        samples = [sample[start:] for sample, start in zip(samples, starts, strict=True)]
    elif case == "holes":
        for sample in samples:
            sample[1::3] = -1
    elif case == "one without a record":
        samples[1] = samples[1][:0]
    if layout in ("left", "right"):
        ids, mask = padded(layout)
        positions = (mask.cumsum(1) - 1).clamp(min=0)  # the same rotations as alone, to the bit
        batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        compare(model, samples, starts, batch, attention_mask=mask)
        return
    ids = torch.cat(rollouts.tokens())[None]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    if layout == "packed":
        compare(model, samples, starts, {"input_ids": ids, "position_ids": positions}, position_ids=positions)
        return
    decisions = rollout_decisions(model, samples, start_len=starts, position_ids=positions)
    wide, mask = (nn.functional.pad(t, (2, 3), value=0) for t in (positions, torch.ones_like(positions)))
    both = rollout_decisions(model, samples, start_len=starts, position_ids=wide, attention_mask=mask)
    assert torch.equal(both.ids[:, 2:-3], decisions.ids)
    assert (both.ids[:, :2] == -1).all()
    assert (both.ids[:, -3:] == -1).all()


FORMATS: dict[str, Any] = {
    "vllm": lambda t: t.numpy(), "prime-rl uint8": lambda t: t.to(torch.uint8),
    "prime-rl uint16": lambda t: t.numpy().astype(np.uint16), "tensorrt-llm": lambda t: t[:, list(MOE)].to(torch.int32),
    "sglang": lambda t: base64.b64encode(t.to(torch.int32).numpy().tobytes()).decode(),
    "sglang, MoE layers": lambda t: base64.b64encode(t[:, list(MOE)].to(torch.int32).numpy().tobytes()),
    "lists": lambda t: t.tolist(),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str) -> None:
    model, samples = rollouts.build(), rollouts.records()
    _, mask = padded("left")
    decisions = rollout_decisions(model, [FORMATS[name](t) for t in samples], attention_mask=mask)
    assert (decisions.layers, decisions.num_experts) == (NAMES, E)
    for i, (sample, n) in enumerate(zip(samples, LENGTHS, strict=True)):
        alone = rollouts.whole(sample, n)
        for layer, router in enumerate(NAMES):
            assert torch.equal(decisions.ids[i, L - n :, layer].long(), alone[router][0])
            assert (decisions.ids[i, : L - n] == -1).all()


def test_a_batch_is_its_sequences() -> None:
    """prime-rl hands over [B, L, layers, K] with the padding in it: told the padding, nothing is read there."""
    model = rollouts.build()
    batch = torch.rand(N, L, rollouts.LAYERS, E).argsort(-1)[..., :K].to(torch.uint8)
    decisions = rollout_decisions(model, batch, attention_mask=torch.ones(N, L))
    assert torch.equal(decisions.ids, batch[:, :, list(MOE)].to(torch.int16))


def test_models_of_our_own_layers() -> None:
    layers = [MoEConfig(dim=4, hidden=4, router=RouterConfig(num_experts=E, top_k=K)).build() for _ in range(2)]
    model = nn.Sequential(*layers)
    sample = torch.rand(5, 2, E).argsort(-1)[..., :K]
    decisions = rollout_decisions(model, [sample], attention_mask=torch.ones(1, 5))
    assert decisions.layers == ("0.router", "1.router")
    assert torch.equal(decisions.ids[0].long(), sample)


def test_the_page_names_the_families_that_are_refused() -> None:
    page = (Path(__file__).parents[3] / "docs/howto/replay.md").read_text()
    (families,) = re.findall(r"refuses by name: (.*?)\. A router", page, re.DOTALL)
    assert len(re.findall(r"`\w+`", families)) == len(UNREACHABLE)


def test_what_does_not_fit_is_said() -> None:
    model, samples = rollouts.build(), rollouts.records()
    _, mask = padded("left")
    twice, high = ([t.clone() for t in samples] for _ in range(2))
    twice[1][2, 2] = 5
    high[2][3, 0, 1] = E

    def refused(says: str, given: Any = samples, **more: Any) -> None:
        with pytest.raises(InputError, match=says):
            rollout_decisions(model, given, **({"attention_mask": mask} | more))

    refused("records of 2 samples, but the batch has 3 sequences", samples[:2])
    refused("is needed, or both", attention_mask=None)
    refused("is needed, or both", position_ids=mask[:2])
    refused("start_len has 1 numbers for 3 samples", start_len=[0])
    refused(r"sample 0: 6 rows from token 2 on, but the sequence has 7", start_len=2)
    refused(r"Qwen3MoeTopKRouter, sample 0: expected integers \[rows, layers, 2\] with 2 MoE layers or 3 layers in all "
            r"\(layers='auto'\), got torch.int16 \(6, 3, 1\)", [t[..., :1] for t in samples])  # fmt: skip
    refused(r"\(layers='moe'\), got torch.int16 \(6, 3, 2\)", layers="moe")
    refused(r"got torch.float32", [t.float() for t in samples])
    refused(r"sample 1: token 2 has experts \[5, 5\] of 8 in layer model\.layers\.2\.mlp\.gate", twice)
    refused(r"sample 2: token 3 has experts \[\d, 8\] of 8 in layer model\.layers\.0\.mlp\.gate", high)
    refused(r"no base64", ["§"] * N)
    refused(r"5 bytes are no int32", [base64.b64encode(b"12345")] * N)
    refused(r"1 ids of int32 are not those of 7 tokens", [base64.b64encode(b"1234")] * N)
    with pytest.raises(ConfigError, match="no Router in Linear: rollout_decisions"):
        rollout_decisions(nn.Linear(2, 2), samples, attention_mask=mask)

    decisions = rollout_decisions(model, samples, attention_mask=mask)
    with replay(model, decisions), pytest.raises(
        InputError, match=r"layers\.0\.mlp\.gate.*Qwen3MoeTopKRouter: decisions for \[B, L\] = \[3, 10\].*got \[2, 15\]"
    ):  # fmt: skip
        model(input_ids=torch.ones(2, 15, dtype=torch.long))
    decisions.ids[0, -3, 1, 0] = -1
    with (
        pytest.raises(InputError, match=r"layers\.2\.mlp\.gate.*Qwen3MoeTopKRouter: a token has either all"),
        replay(model, decisions),
    ):
        pass
