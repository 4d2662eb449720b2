"""Callbacks in real Trainers: trackers, the file and a counter of the test's own say the same; biases move by steps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import trimtab
from helpers.families import build_model, experts_modules
from helpers.ranks import run_ranks
from helpers.small_trainers import options, sft
from trimtab.autograd import in_backward
from trimtab.errors import ConfigError
from trimtab.integrations.transformers import LoadBalancerCallback, LoadCallback
from trimtab.integrations.transformers.routers.find import find_routers
from trimtab.routing.loads import load_metrics, load_scalars

pytestmark = pytest.mark.usefixtures("one_thread")

EVERY = 2


class Truth(TrainerCallback):
    """Decisions as experts get them, of real tokens, by layer and step."""

    def __init__(self, model: nn.Module) -> None:
        self.steps: list[dict[str, Tensor]] = []
        self.now: dict[str, Tensor] = {}
        self.mask = torch.ones(())
        model.register_forward_pre_hook(self._mask, with_kwargs=True)
        for name, experts in experts_modules(model).items():
            experts.register_forward_pre_hook(lambda module, args, name=name: self._see(name, module, args))

    def _mask(self, _model: nn.Module, _args: Any, kwargs: Any) -> None:
        self.mask = kwargs["attention_mask"].flatten().bool()

    def _see(self, name: str, module: Any, args: Any) -> None:
        if module.training and not in_backward():
            counts = args[1][self.mask].flatten().bincount(minlength=8)
            gate = name.replace("experts", "gate")
            self.now[gate] = self.now.get(gate, 0) + counts

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(self.now)
        self.now = {}

    def records(self) -> dict[int, dict[str, Any]]:
        """By the steps of reports, what is to be in the lines."""
        found = {}
        for end in [*range(EVERY, len(self.steps), EVERY), len(self.steps)]:
            start = (end - 1) // EVERY * EVERY
            sums = {name: sum(step[name] for step in self.steps[start:end]) for name in self.steps[0]}
            found[end] = {name: load_metrics(loads.tolist()) for name, loads in sums.items()}  # type: ignore[union-attr]
        return found


def run_sft(folder: Path, **more: Any) -> tuple[Any, Truth]:
    """With recomputation, whose tokens count once."""
    model = build_model("qwen3_moe")
    trainer = sft(model, options(folder, gradient_checkpointing=True, **more))
    truth = Truth(model)
    trainer.add_callback(truth)
    trainer.add_callback(LoadCallback(trainer, every=EVERY))
    torch.manual_seed(0)
    trainer.train()
    return trainer, truth


def lines(folder: Path) -> dict[int, dict[str, Any]]:
    records = map(json.loads, (folder / "loads.jsonl").read_text().splitlines())
    return {record["step"]: record["layers"] for record in records}


def test_file_picture_history_and_tensorboard_have_the_numbers(tmp_path: Path) -> None:
    """Of TRL's SFT with evaluations between the steps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer, truth = run_sft(tmp_path, report_to=["tensorboard"], eval_strategy="steps", eval_steps=1)
    wanted = truth.records()
    assert list(wanted) == [2, 4, 5]
    assert lines(tmp_path) == wanted
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
    history = [entry for entry in trainer.state.log_history if "loads/max_vio" in entry]
    assert history == [{**load_scalars(layers), "step": step} for step, layers in wanted.items()]
    mine = [entry for entry in trainer.state.log_history if "mean_token_accuracy" in entry]
    assert [entry["step"] for entry in mine] == [3], "TRL's own means are of its own logging steps"
    hooks = [hook for module in trainer.model.modules() for hook in module._forward_hooks.values()]
    assert "ModelPorts" not in str(hooks)
    (file,) = tmp_path.rglob("events.out.tfevents*")
    events = EventAccumulator(str(file)).Reload()
    for step, layers in wanted.items():
        for key, value in load_scalars(layers).items():
            (found,) = [event.value for event in events.Scalars(f"train/{key}") if event.step == step]
            assert found == pytest.approx(value, rel=1e-6), key


def train_here(folder: str) -> dict[int, Any]:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}  # unused: there is a group
    _, truth = run_sft(Path(folder), ddp_backend="gloo", average_tokens_across_devices=False)
    return truth.records()


@pytest.mark.xdist_group("ranks")
def test_two_ranks_are_summed(tmp_path: Path) -> None:
    one, two = run_ranks(train_here, 2, str(tmp_path))
    assert one != two
    for step, layers in lines(tmp_path).items():
        for name, record in layers.items():
            own = (rank[step][name]["tokens_per_expert"] for rank in (one, two))
            assert record == load_metrics([a + b for a, b in zip(*own, strict=True)])


class OwnLayers(nn.Module):
    """A model of one's own with an expert capacity, as a Trainer takes it."""

    def __init__(self) -> None:
        super().__init__()
        router = trimtab.MoEConfig(
            dim=8, hidden=8, router=trimtab.RouterConfig(num_experts=4, top_k=2, capacity_factor=0.75)
        )
        self.moe = router.build()
        self.seen: list[Tensor] = []

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = torch.nn.functional.one_hot(input_ids % 8, 8).float()
        out = self.moe(x)
        self.seen.append(out.loads_E)
        return {"loss": out.y.square().mean()}


def test_layers_of_trimtab_show_what_they_drop(tmp_path: Path) -> None:
    model = OwnLayers()
    rows = [{"input_ids": torch.full((8,), n % 3)} for n in range(8)]
    config = TrainingArguments(**options(tmp_path, max_steps=2, remove_unused_columns=False))
    trainer = Trainer(model=model, args=config, train_dataset=rows)
    trainer.add_callback(LoadCallback(trainer, every=3, folder=tmp_path / "loads", most_keys=9))
    trainer.train()
    ((step, layers),) = lines(tmp_path / "loads").items()
    kept = torch.stack(model.seen).sum(0)
    slots = 2 * 2 * 2 * 8 * 2
    assert step == 2
    assert layers["moe.router"] == load_metrics(kept.tolist(), slots - int(kept.sum()))
    assert layers["moe.router"]["drop_rate"] > 0.1


def test_a_balancer_ends_its_steps_in_a_trainer(tmp_path: Path) -> None:
    model = build_model("qwen3_moe")
    config = TrainingArguments(**options(tmp_path, max_steps=3))
    rows = [{"input_ids": [n + 2, 3, 4 * n + 1, 5], "labels": [n + 2, 3, 4 * n + 1, 5]} for n in range(12)]
    trainer = Trainer(model=model, args=config, train_dataset=rows)
    callback = LoadBalancerCallback(trainer, rate=0.25, add_bias=True, aux_loss=0.1)
    taken: list[dict[str, Tensor]] = []
    step = callback.balance.step
    callback.balance.step = lambda: taken.append(step()) or taken[-1]  # type: ignore[method-assign]
    trainer.add_callback(callback)
    trainer.train()
    assert callback.balance.micro_batches == 2
    assert len(taken) == 3
    assert all(int(load.sum()) == 2 * 2 * 4 * 2 for loads in taken for load in loads.values())
    for place in find_routers(model):
        mean = 2 * 2 * 4 * 2 / 8
        moved = sum((mean - loads[place.name].double()).sign() for loads in taken) * 0.25
        assert torch.equal(place.module.selection_bias.double(), moved)
    config.fp16 = True
    with pytest.raises(ConfigError, match="bf16 instead of fp16"):
        LoadBalancerCallback(trainer, bias=None, aux_loss=0.1)


def test_what_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    config = TrainingArguments(**options(tmp_path))
    trainer = Trainer(model=nn.Linear(2, 2), args=config, train_dataset=[])
    for wrong in ({"every": 0}, {"most_keys": 4}):
        with pytest.raises(ConfigError):
            LoadCallback(trainer, **wrong)
    callback = LoadCallback(trainer)
    with pytest.raises(ConfigError, match="no Router in Linear"):
        callback.on_train_begin(config, trainer.state, trainer.control)
