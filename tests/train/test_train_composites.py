"""Composite models: their text part is trained as in the whole model, all else comes back bit for bit."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from helpers.composites import FAMILIES, save_composite
from trimtab.train.assistant_spans import IGNORED
from trimtab.train.config import TrainConfig
from trimtab.train.packing import RankBlocks
from trimtab.train.plan import Plan, plan_run
from trimtab.train.session import run_session

pytestmark = pytest.mark.xdist_group("train_composites")
LR = 0.5


@pytest.fixture(scope="module", params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_composite(request.param, tmp_path_factory.mktemp(request.param))


def run(base: Path, text: Path, out: Path, **more: Any) -> Plan:
    """Two steps of SGD, in this process."""
    values: dict[str, Any] = {"seq_len": 32, "batch_size": 2, "max_steps": 2, "optim": "sgd", "lr": LR, "warmup": 0}
    values |= {"scheduler": "constant_with_warmup", "weight_decay": 0.0}
    plan = plan_run(TrainConfig(model=str(base), data=(str(text),), out=str(out), **values | more), 1)
    run_session(plan, prepared=False)
    return plan


def load_whole(folder: Path) -> Any:
    """By transformers alone: every tensor has a place, and every place a tensor."""
    model, report = AutoModelForImageTextToText.from_pretrained(
        folder, experts_implementation="eager", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model


def test_the_text_part_learns_as_in_the_whole_model(base: Path, text: Path, tmp_path: Path) -> None:
    plan = run(base, text, tmp_path / "run")
    whole, trained = load_whole(base).train(), load_whole(tmp_path / "run/final").state_dict()
    before = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    sgd = torch.optim.SGD(whole.parameters(), lr=LR)
    rows = iter(RankBlocks(plan.blocks(), batch=2, rank=0, size=1, seed=0))
    for _ in range(2):
        batch = list(islice(rows, 2))
        nlls = [_nll(whole, row) for row in batch]
        targets = sum(int((row["labels"][1:] != IGNORED).sum()) for row in batch)
        (sum(nlls) / targets).backward()
        learned = {name for name, p in whole.named_parameters(remove_duplicate=False) if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        sgd.step()
        sgd.zero_grad()
    wanted = whole.state_dict()
    assert trained.keys() == wanted.keys()
    assert any("experts" in name for name in learned)
    for name, value in wanted.items():
        if name in learned:
            moved = [weight - before[name] for weight in (trained[name], value)]
            torch.testing.assert_close(*moved, rtol=1e-3, atol=2e-6, msg=partial("{}: {}".format, name))
        else:
            assert torch.equal(trained[name], before[name]), name
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "run/final", base))
    assert {name: t.dtype for name, t in ours.items()} == {name: t.dtype for name, t in theirs.items()}
    assert (tmp_path / "run/final/preprocessor_config.json").read_bytes() == (
        base / "preprocessor_config.json"
    ).read_bytes()


def _nll(whole: Any, row: dict[str, torch.Tensor]) -> torch.Tensor:
    real = int(row["real"].sum()) if "position_ids" in row else len(row["real"])  # what fills up is apart there
    logits = whole(input_ids=row["input_ids"][None, :real], use_cache=False).logits[0].float()
    return F.cross_entropy(logits[:-1], row["labels"][1:real], ignore_index=IGNORED, reduction="sum")
