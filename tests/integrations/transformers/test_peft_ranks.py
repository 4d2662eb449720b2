"""Adapters on experts that are spread over ranks: in transformers' Trainer, saved and resumed, merged."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.comparing import full_value
from helpers.families import build_model, forward, sample_batch
from helpers.model_case import Case, Mesh
from helpers.model_ranks import REPLICATED, begin, load
from helpers.peft_case import adapt, fill, lora
from helpers.ranks import run_ranks
from trimtab.integrations.transformers.lora import average_replicated
from trimtab.routing.loads import load_scalars

pytestmark = pytest.mark.usefixtures("registered", "one_thread")

TWO = Case(family="qwen3_moe", mesh=Mesh(ep=2, fsdp=2), dtype=torch.float64)


def adapters_of(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}


def run_trainer(base: Any, folder: str, accumulate: int, average: bool) -> tuple[dict[str, Tensor], list[float]]:
    """Two steps of transformers' Trainer on adapters of experts and attention, clipped; the adapters, and their
    gradients' norms before that. average: by `average_replicated`."""
    from transformers import Trainer, TrainingArguments

    from trimtab.integrations.transformers import LoadCallback

    model = adapt(base, target_modules=["q_proj"])
    if average:
        average_replicated(model)
    draw = torch.Generator().manual_seed(1)
    rows = []
    for length in (11, 3, 7, 11, 5, 2, 11, 4) * 2:  # so many targets of 11
        ids = torch.randint(64, (11,), generator=draw)
        rows.append({"input_ids": ids, "labels": torch.where(torch.arange(11) < length, ids, -100)})
    arguments = TrainingArguments(
        output_dir=folder, max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=accumulate,
        max_grad_norm=0.1, optim="sgd", learning_rate=1.0, lr_scheduler_type="constant", logging_steps=1, bf16=False,
        use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", train_sampling_strategy="sequential",
        ddp_backend="gloo" if dist.is_initialized() else None,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.add_callback(LoadCallback(trainer, every=1))
    trainer.train()
    return adapters_of(model), [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


def train_in_trainer(folder: str) -> list[tuple[dict[str, Tensor], list[float]]]:
    """With and without `average_replicated`, and with replicated experts, whose loads are in the last file: two batches
    a step and rank."""
    begin()
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}  # unused: there is a group
    replicated = replace(TWO, experts=REPLICATED, exchange=REPLICATED)
    ways = (TWO, False), (TWO, True), (replicated, True)
    return [run_trainer(load(case, folder), folder, 2, average) for case, average in ways]


def test_a_trainer_that_accumulates_and_clips_does_what_one_process_does(tmp_path: Path) -> None:
    """Four batches a step, two on each rank: transformers' Trainer averages adapters itself, and twice is once."""
    base = build_model("qwen3_moe", dtype=torch.float64)
    base.set_experts_implementation("eager")
    wanted, norms = run_trainer(base, str(tmp_path), 4, average=False)
    assert len(norms) == 2
    assert min(norms) > 0.2, "clipped"
    for ways in run_ranks(train_in_trainer, 2, str(tmp_path)):
        for adapters, found in ways:
            assert found == pytest.approx(norms, rel=1e-10)
            for name, value in wanted.items():
                torch.testing.assert_close(adapters[name], value, rtol=1e-10, atol=1e-12, msg=name)
    lines = [json.loads(line)["layers"] for line in (tmp_path / "loads.jsonl").read_text().splitlines()]
    assert [len(layers) for layers in lines] == [2, 2], "by layer and step"
    for layers in lines:
        reports = [layer["replicated"] for layer in layers.values()]
        for report in reports:
            assert 1 <= report["busiest_after"] < 1.05, "a row more than the mean, where that is no whole number"
            assert (report["replicas"] > 0) == (report["busiest_before"] > report["busiest_after"])
        scalars = load_scalars(layers, most_keys=9)
        for key in ("replicas", "replica_bytes"):
            assert scalars[f"loads/{key}"] == sum(report[key] for report in reports) > 0
        assert len(scalars) == 9
        assert "loads/replicas" not in load_scalars(layers, most_keys=8)


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    base = model.get_base_model()
    forward(base, sample_batch(base, 2, 12, 2 * dist.get_rank() + seed))[1].backward()
    optimizer.step()


def train_save_and_resume(folder: str) -> dict[str, Tensor]:
    """Two steps, and the same with an adapter that was saved between them: equal bits. The adapters behind the first;
    rank 0 leaves them in `folder`/adapter."""
    from peft import PeftModel

    begin()
    model = adapt(load(TWO, folder))
    average_replicated(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    step(model, optimizer, 0)
    first, moments = adapters_of(model), optimizer.state_dict()
    model.save_pretrained(folder + "/adapter", is_main_process=dist.get_rank() == 0)  # gathers the base: collective
    if dist.get_rank() == 0:
        torch.save(moments, Path(folder, "moments.pt"))
    dist.barrier()
    step(model, optimizer, 1)

    again = PeftModel.from_pretrained(
        load(TWO, folder), folder + "/adapter", is_trainable=True, autocast_adapter_dtype=False
    )
    average_replicated(again)
    optimizer = torch.optim.AdamW([p for p in again.parameters() if p.requires_grad], lr=1e-2)
    optimizer.load_state_dict(torch.load(Path(folder, "moments.pt")))
    step(again, optimizer, 1)
    for name, value in adapters_of(model).items():
        assert torch.equal(value, adapters_of(again)[name]), name
    return first


def alone(folder: Path) -> Any:
    """An adapter of the ranks, loaded by one process."""
    from peft import PeftModel

    base = build_model("qwen3_moe", dtype=torch.float64)
    return PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False)


def test_adapters_resume_bit_for_bit_and_load_at_another_degree(tmp_path: Path) -> None:
    ranks = run_ranks(train_save_and_resume, 2, str(tmp_path))
    loaded = adapters_of(alone(tmp_path / "adapter"))
    assert len(loaded) == 8
    for first in ranks:
        assert all(torch.equal(first[name], value) for name, value in loaded.items()), "alike on every rank, and whole"


def merge_several(case: Case, folder: str) -> dict[str, Tensor]:
    """Two adapters on sharded experts, saved; the second one is active and merged. The merged parameters."""
    begin()
    base = load(case, folder)
    two = lora(base, r=2)  # before peft's wrappers have other names
    model = adapt(base)
    model.add_adapter("two", two, autocast_adapter_dtype=False)
    fill(model)
    model.set_adapter("two")
    with torch.no_grad():
        batch = sample_batch(base, 2, 12, 0)
        before = forward(model.get_base_model(), batch)[0].clone()
        model.save_pretrained(folder + "/several", is_main_process=dist.get_rank() == 0)
        merged = model.merge_and_unload()
        torch.testing.assert_close(forward(merged, batch)[0], before, rtol=1e-10, atol=1e-10)
    return {name: full_value(p).detach() for name, p in merged.named_parameters()}


@pytest.mark.parametrize("mesh", [TWO.mesh, Mesh(tp=2)], ids=str)
def test_one_of_two_adapters_is_merged_into_sharded_experts_and_saved(mesh: Mesh, tmp_path: Path) -> None:
    """Byte for byte what one process merges of the saved adapter."""
    ranks = run_ranks(merge_several, 2, replace(TWO, mesh=mesh), str(tmp_path))
    for name, value in alone(tmp_path / "several" / "two").merge_and_unload().named_parameters():
        assert all(torch.equal(merged[name], value) for merged in ranks), name
