"""Muon where users have it: transformers' own meshes, the Trainers of transformers and TRL, accelerate."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.comparing import full_value
from helpers.families import build_model, forward, sample_batch, save_model
from helpers.ranks import run_ranks
from helpers.small_trainers import options, sequences, sft
from trimtab.optim import Muon, for_trainer

FAMILY = "qwen3_moe"


def values(model: Any) -> dict[str, Tensor]:
    return {name: full_value(p).detach().clone() for name, p in model.named_parameters()}


def stepped(folder: str, mesh: dict[str, int]) -> dict[str, Tensor]:
    """Three steps of a model that transformers lays out, on a batch that all ranks share."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    given = {"distributed_config": DistributedConfig(**mesh)} if mesh else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager", **given)
    model.to(torch.float64)
    optimizer, batch = Muon(model, lr=0.01, ns_dtype=torch.float64, eps=1.0), sample_batch(model, 2, 8)
    for _ in range(3):
        forward(model, batch)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def under(folder: str, mesh: dict[str, int]) -> float:
    true, found = stepped(folder, {}), stepped(folder, mesh)
    assert true.keys() == found.keys()
    return max(float((true[name] - found[name]).abs().max()) for name in true)


@pytest.mark.parametrize("mesh", [{"ep_size": 2, "fsdp_size": 2}, {"fsdp_size": 2}, {"tp_size": 2}], ids=str)
def test_transformers_own_meshes_have_the_values_of_one_process(mesh: dict[str, int], tmp_path: Path) -> None:
    save_model(FAMILY, tmp_path / "model")
    assert max(run_ranks(under, 2, str(tmp_path / "model"), mesh, deadline=120.0)) < 1e-12


def test_the_trainer_takes_the_steps_of_a_loop_written_by_hand(tmp_path: Path) -> None:
    """Clipping, accumulation over two batches, a linear schedule."""
    from transformers import Trainer, TrainingArguments

    model = build_model(FAMILY).train()
    other, data = copy.deepcopy(model), sequences()
    rows = [{"input_ids": row[:3], "labels": row[:3]} for row in data["input_ids"]]
    made = TrainingArguments(**options(tmp_path, max_steps=3, lr_scheduler_type="linear", max_grad_norm=0.05))
    trainer = Trainer(model=model, args=made, train_dataset=rows, optimizer_cls_and_kwargs=(for_trainer, {"lr": 0.02}))
    batches = [{name: t.clone() for name, t in batch.items()} for batch in _in_order(trainer)]
    trainer.train()
    optimizer = Muon(other, lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (3 - step) / 3)
    for step in range(3):
        for batch in batches[2 * step : 2 * step + 2]:
            (other(**batch).loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 0.05)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3, msg=name)  # iterated in bfloat16


def _in_order(trainer: Any) -> list[Any]:
    torch.manual_seed(trainer.args.seed)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    return list(trainer.get_train_dataloader())


def test_trls_trainer_and_accelerate_take_it(tmp_path: Path) -> None:
    model = build_model(FAMILY)
    before = values(model)
    trainer = sft(model, options(tmp_path, max_steps=1), optimizer_cls_and_kwargs=(for_trainer, {"lr": 0.01}))
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, Muon)
    assert [name for name, t in values(model).items() if "experts" in name and torch.equal(t, before[name])] == []
    from accelerate import Accelerator

    one, batch = build_model(FAMILY), sample_batch(model, 2, 8)
    two = copy.deepcopy(one)
    accelerator = Accelerator(cpu=True)
    theirs, optimizer = accelerator.prepare(one, Muon(one))
    accelerator.backward(forward(theirs, batch)[1])
    alone, scaler = Muon(two), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(forward(two, batch)[1]).backward()
    optimizer.step()
    scaler.step(alone)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
