"""What does not fit is refused, with names and both values, before anything is overwritten."""

from __future__ import annotations

import json
import random
import resource
from collections import deque
from fractions import Fraction
from pathlib import Path
from traceback import StackSummary
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from helpers.ranks import run_ranks
from helpers.reshard_case import D, Model
from trimtab import MoEConfig, RouterConfig, errors
from trimtab.checkpoint import load, read_tensors, save, write_tensors
from trimtab.checkpoint.folder import INDEX, read_index, whole_checkpoints
from trimtab.checkpoint.state import expert_shapes, model_tensors
from trimtab.errors import ConfigError, InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of a model and its optimizer."""
    return save(tmp_path, *trained(), step=7, extra={"note": "x"})


def trained(experts: int = 4, **options: Any) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(experts)
    model = Model(experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    model(torch.randn(2, 3, D)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def edit(folder: Path, **fields: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(index | fields))


def test_other_models_are_refused_and_stay_as_they_are(folder: Path) -> None:
    other, optimizer = trained(6)
    renamed = nn.Module()
    renamed.layer = Model().layers[0]["moe"]
    cases = [
        ((other, optimizer), ["(4, 2, 8, 8)", "(6, 2, 8, 8) here", "experts.gate_up"]),
        ((Model(4).double(),), ["float32", "float64 here"]),
        ((renamed,), ["lacks layer.", "has, and the model has not, layers.0", "more"]),
        ((Model(), torch.optim.SGD([nn.Parameter(torch.ones(2))])), ["a parameter (2,) that is not of the model"]),
        ((model := Model(), torch.optim.SGD([model.layers[0]["moe"].router.weight])), ["other parameters", "only in"]),
    ]
    for wrong, parts in cases:
        before = [p.clone() for p in wrong[0].parameters()]
        with pytest.raises(ConfigError) as error:
            load(folder, *wrong)
        for part in parts:
            assert part in str(error.value)
        assert all(torch.equal(a, b) for a, b in zip(before, wrong[0].parameters(), strict=True))


def test_groups_of_other_options_are_refused(tmp_path: Path) -> None:
    model = Model()
    first, *others = model.parameters()
    groups = [{"params": [first], "weight_decay": 0.5}, {"params": others}]
    folder = save(tmp_path, model, torch.optim.AdamW(groups, lr=torch.tensor(0.25)), step=0)
    with pytest.raises(ConfigError, match="had other options"):
        load(folder, model, torch.optim.AdamW(model.parameters()))
    again = torch.optim.AdamW([{"params": [p]} for p in model.parameters()], lr=0.1, betas=(0.5, 0.5))
    load(folder, model, again)
    assert [g["weight_decay"] for g in again.param_groups] == [0.5] + [0.01] * len(others)
    assert all((g["lr"], g["betas"]) == (0.25, (0.9, 0.999)) for g in again.param_groups)


def test_another_kind_of_optimizer_is_refused_and_keeps_its_options(folder: Path) -> None:
    model = Model(4)
    other = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with pytest.raises(ConfigError, match="has the state of AdamW, and the optimizer here is SGD"):
        load(folder, model, other)
    assert other.param_groups[0]["lr"] == 0.5
    assert not other.state


def test_folders_that_are_no_whole_checkpoint(folder: Path, tmp_path: Path) -> None:
    model = Model()
    with pytest.raises(InputError, match="no such folder"):
        load(tmp_path / "nowhere", model)
    with pytest.raises(ConfigError, match="a checkpoint of step 7 already"):
        save(tmp_path, model, step=7)
    before = read_index(folder).format
    for other, do in ((99, "update it"), (1, "load it with the trimtab that wrote it")):
        edit(folder, format=other, trimtab="9.9")
        with pytest.raises(InputError, match=rf"format {other}, written by trimtab 9\.9; .* reads format 3: {do}"):
            load(folder, model)
    edit(folder, format=before)
    data = folder / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-5])
    with pytest.raises(InputError, match=r"not whole: __0_0.distcp has \d+ of \d+ bytes"):
        load(tmp_path, model)
    for text in ("{", json.dumps({"format": before})):
        (folder / INDEX).write_text(text)
        with pytest.raises(InputError, match="not an index"):
            read_index(folder)
    (folder / INDEX).unlink()
    with pytest.raises(InputError, match="step-00000007 was not written to the end"):
        load(tmp_path, model)


WRONG: list[dict[str, Any]] = [
    *({"step": step} for step in (-1, 1.0, "5", None, True)),
    *({"keep": keep} for keep in (0, True, 1.5)),
    *({"extra": extra} for extra in ({"loss": np.float32(2.5)}, {"loss": torch.ones(1)}, [1], "")),
    *({"files": {name: ""}} for name in ("", ".", "..", "../x", "a/b", "a\0", INDEX, ".metadata", ".metadata.tmp", 1)),
    *({"files": files} for files in ({"rank-00000.pt": ""}, {"__0_0.distcp": b""}, {"config.json": {}})),
    *({"rank_extra": [extra]} for extra in (np.arange(3), np.float64(1), Fraction(1, 2), deque([1]), lambda: 1)),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_arguments_that_cannot_be_saved_or_read_again_leave_nothing(wrong: dict[str, Any], tmp_path: Path) -> None:
    (name,) = wrong
    with pytest.raises((ConfigError, InputError), match=rf"^{name}[=:]"):
        save(tmp_path, nn.Linear(2, 2), **{"step": 1} | wrong)
    if name in ("step", "extra", "files"):
        with pytest.raises((ConfigError, InputError), match=rf"^{name}[=:]"):
            write_tensors(tmp_path, {"model.a": torch.ones(2)}, experts={}, **{"step": 1} | wrong)
    assert not list(tmp_path.iterdir())


def test_arguments_of_numpy_and_containers_come_back(tmp_path: Path) -> None:
    extra = {"a": [(1, None, "x"), {2.5, True}], "t": torch.arange(3), "b": b"x"}
    folder = save(tmp_path, nn.Linear(2, 2), step=np.int64(3), keep=np.int64(1), rank_extra=extra)
    loaded = load(folder, nn.Linear(2, 2))
    assert (loaded.index.step, folder.name) == (3, "step-00000003")
    assert loaded.own is not None
    assert str(loaded.own["extra"]) == str(extra)
    files = {"é" * 127: "é", "b": b"\xff"}
    folder = write_tensors(tmp_path, {"model.a": torch.ones(2)}, step=np.int64(4), experts={}, files=files)
    assert read_index(folder).step == 4
    assert [(folder / name).read_bytes() for name in files] == ["é".encode(), b"\xff"]


def test_without_an_optimizer(tmp_path: Path) -> None:
    model, optimizer = trained()
    folder = save(tmp_path, model, step=1)
    with pytest.raises(ConfigError, match="no optimizer state"):
        load(folder, model, optimizer)
    assert load(folder, Model()).index.optimizer is None
    assert save(tmp_path, model, step=2, keep=1) == whole_checkpoints(tmp_path)[0]


def test_states_of_other_optimizers(tmp_path: Path) -> None:
    for number, make in enumerate((torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adafactor, torch.optim.Rprop)):
        options: dict[str, Any] = {"momentum": 0.9} if make is torch.optim.SGD else {}
        model = Model()
        optimizer = make(model.parameters(), lr=0.1, **options)

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            model(torch.ones(1, 3, D)).square().sum().backward()
            optimizer.step()

        step()
        folder = save(tmp_path, model, optimizer, step=number)
        saved = {key: value.clone() for key, value in read_tensors(folder).items() if key.startswith("optim.")}
        step()
        load(folder, model, optimizer)
        again = read_tensors(save(tmp_path / "again", model, optimizer, step=number))
        assert saved.keys() == {key for key in again if key.startswith("optim.")}
        assert all(torch.equal(saved[key], again[key]) for key in saved)
    fresh = Model()
    with pytest.raises(ConfigError, match="take a step before loading"):
        load(tmp_path / "step-00000002", fresh, torch.optim.Adafactor(fresh.parameters()))


def test_random_numbers_of_every_kind_come_back(tmp_path: Path) -> None:
    def draw(model: Model) -> tuple[Any, ...]:
        own = model.layers[0]["moe"].router.generator
        return (
            random.random(),
            random.gauss(0, 1),
            float(np.random.rand()),  # noqa: NPY002
            torch.rand(2).tolist(),
            own.get_state()[:99],
        )

    def make() -> Model:
        model = Model()
        model.layers[0]["moe"].router.generator = torch.Generator().manual_seed(len(whole_checkpoints(tmp_path)))
        return model

    model = make()
    random.gauss(0, 1)  # which keeps a second number
    save(tmp_path, model, step=1)
    drawn = draw(model)
    other = make()
    loaded = load(tmp_path, other)
    assert str(draw(other)) == str(drawn)
    loaded.restore_random()
    assert torch.rand(2).tolist() == drawn[3]


def test_whole_tensors_without_a_model(tmp_path: Path) -> None:
    tensors = {"model.a": torch.randn(3, 4)[:, ::2], "model.none": torch.zeros(0, 2), "model.one": torch.tensor(1.5)}
    tensors["model.low"] = torch.randn(5).bfloat16()
    folder = write_tensors(tmp_path, tensors, step=0, experts={}, files={"config.json": "{}"})
    assert (folder / "config.json").read_text() == "{}"
    found = read_tensors(folder)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensors[key]) and found[key].dtype == tensors[key].dtype for key in tensors)
    with pytest.raises(InputError, match=r"holds no model\.b"):
        read_tensors(folder, ["model.b"])


def test_tensors_alone_end_the_step_that_was_being_counted(tmp_path: Path) -> None:
    config = MoEConfig(dim=8, hidden=8, router=RouterConfig(num_experts=4, top_k=1, global_aux_loss=1.0))
    model = nn.ModuleDict({"moe": config.build()})
    tensors = {key: value.detach().clone() for key, value in model_tensors(model).items()}
    write_tensors(tmp_path, tensors, step=0, experts=expert_shapes(model))
    x_TD = torch.randn(32, 8)
    first = model["moe"](x_TD).losses["global_aux"]
    model["moe"](x_TD + 1.0)
    load(tmp_path, model)
    assert torch.equal(model["moe"](x_TD).losses["global_aux"], first)
    assert model["moe"].router.take_loads().sum() == 32


def test_what_was_just_written_is_kept(tmp_path: Path) -> None:
    for step in (100, 150):
        save(tmp_path, *trained(), step=step)
    again = save(tmp_path, *trained(), step=60, keep=2)
    assert [path.name for path in whole_checkpoints(tmp_path)] == [again.name, "step-00000150"]


class Asked(BaseException):
    """What a signal's handler raises, wherever the program is."""


def test_a_signal_in_a_save_ends_the_program_as_it_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = save(tmp_path, *trained(), step=1)
    with monkeypatch.context() as patched:
        patched.setattr(DefaultSavePlanner, "lookup_object", Mock(side_effect=Asked(15)))
        with pytest.raises(Asked):
            save(tmp_path, *trained(), step=2)
    assert whole_checkpoints(tmp_path) == [whole]


@pytest.mark.parametrize("writer", ["torch.save", "trimtab.checkpoint.tensors.dcp_save"])
def test_a_disk_without_room_is_named(writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's writer says `unexpected pos 704 vs 598` then."""

    def fails(*args: object, **options: object) -> None:
        error = RuntimeError("unexpected pos 704 vs 598")
        raise CheckpointException("save", {0: (error, StackSummary())}) if "dcp" in writer else error

    monkeypatch.setattr(writer, fails)
    for least, says in ((0, "598$"), (1 << 62, rf"598; [0-9.]+ MB are free on the disk of {tmp_path}")):
        monkeypatch.setattr(errors, "LEAST_FREE", least)
        with pytest.raises(InputError, match=f"unexpected pos 704 vs {says}"):
            save(tmp_path / str(least), nn.Linear(2, 2), step=1)


def test_a_router_without_the_generator_that_was_saved_is_named(tmp_path: Path) -> None:
    model = Model()
    model.layers[0]["moe"].router.generator = torch.Generator()
    save(tmp_path, model, step=1)
    with pytest.warns(UserWarning, match=r"router layers\.0\.moe\.router: .* before `load`") as warned:
        load(tmp_path, Model())
    assert [warning.filename for warning in warned] == [__file__]


def save_with_small_files(root: str) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    with pytest.raises(InputError) as refused:
        save(root, nn.Linear(200, 200), step=1)
    return str(refused.value)


def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path) -> None:
    (said,) = run_ranks(save_with_small_files, 1, str(tmp_path), deadline=90.0)
    assert "this process may write files of 0.1 MB at most (ulimit -f)" in said
