"""Adapters that are saved from and loaded onto expert-parallel ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import trimtab.integrations.transformers
from trimtab.integrations.transformers.lora import average_replicated

from .ep_case import Case, freeze
from .ep_ranks import REPLICATED, full, load, quiet
from .families import forward, sample_batch
from .peft_case import fill, lora


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    forward(model.get_base_model(), sample_batch(model.get_base_model(), 2, 12, seed))[1].backward()
    optimizer.step()


def adapters_of(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}


def train_save_and_resume(case: Case, folder: str) -> dict[str, Tensor]:
    """Two steps on this number of ranks, and the same with an adapter that was saved between them: equal bits.

    Returns the adapters behind the first step; rank 0 leaves them in `folder`/adapter.
    """
    from peft import PeftModel, get_peft_model

    quiet()
    trimtab.integrations.transformers.register()
    freeze(case, base := load(case, folder))
    model = get_peft_model(base, lora(base), autocast_adapter_dtype=False)
    fill(model)
    average_replicated(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    step(model, optimizer, 2 * dist.get_rank())
    first, moments = adapters_of(model), optimizer.state_dict()
    model.save_pretrained(folder + "/adapter", is_main_process=dist.get_rank() == 0)  # gathers the base: collective
    if dist.get_rank() == 0:
        torch.save(moments, Path(folder, "moments.pt"))
    dist.barrier()
    step(model, optimizer, 2 * dist.get_rank() + 1)

    again = PeftModel.from_pretrained(
        load(case, folder), folder + "/adapter", is_trainable=True, autocast_adapter_dtype=False
    )
    average_replicated(again)
    optimizer = torch.optim.AdamW([p for p in again.parameters() if p.requires_grad], lr=1e-2)
    optimizer.load_state_dict(torch.load(Path(folder, "moments.pt")))
    step(again, optimizer, 2 * dist.get_rank() + 1)
    for name, value in adapters_of(model).items():
        assert torch.equal(value, adapters_of(again)[name]), name
    return first


def merge_several(case: Case, folder: str) -> dict[str, Tensor]:
    """Two adapters on sharded experts, saved; the second one is active and merged. Returns the merged parameters."""
    from peft import get_peft_model

    quiet()
    trimtab.integrations.transformers.register()
    base = load(case, folder)
    two = lora(base, r=2)  # before peft's wrappers have other names
    model = get_peft_model(base, lora(base), autocast_adapter_dtype=False)
    model.add_adapter("two", two, autocast_adapter_dtype=False)
    fill(model)
    model.set_adapter("two")
    with torch.no_grad():
        batch = sample_batch(base, 2, 12, 0)
        before = forward(model.get_base_model(), batch)[0].clone()
        model.save_pretrained(folder + "/several", is_main_process=dist.get_rank() == 0)
        merged = model.merge_and_unload()
        torch.testing.assert_close(forward(merged, batch)[0], before, rtol=1e-10, atol=1e-10)
    return {name: full(p) for name, p in merged.named_parameters()}


def run_trainer(base: Any, folder: str, accumulate: int, average: bool) -> tuple[dict[str, Tensor], list[float]]:
    """Two steps of transformers' Trainer on adapters of experts and attention, clipped; the adapters, and their
    gradients' norms before that. average: by `average_replicated`."""
    from peft import get_peft_model
    from transformers import Trainer, TrainingArguments

    from trimtab.integrations.transformers import LoadCallback

    model = get_peft_model(base, lora(base, target_modules=["q_proj"]), autocast_adapter_dtype=False)
    fill(model)
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


def train_in_trainer(case: Case, folder: str) -> list[tuple[dict[str, Tensor], list[float]]]:
    """With and without `average_replicated`, and with replicated experts, whose loads are in the last file: two batches
    a step and rank."""
    quiet()
    trimtab.integrations.transformers.register()
    trimtab.integrations.transformers.register(REPLICATED, replicate_experts=0.0, copy_cost=0)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}  # unused: there is a group
    replicated = replace(case, experts=REPLICATED, exchange=REPLICATED)
    ways = (case, False), (case, True), (replicated, True)
    return [run_trainer(load(case, folder), folder, 2, average) for case, average in ways]
