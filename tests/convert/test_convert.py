"""There and back bit for bit, for every family; what arrives opens in plain transformers and in trimtab.checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from helpers.convert_case import FAMILIES, assert_same, build, logits, state_of, tensors_of
from helpers.families import build_model, family_names
from trimtab.checkpoint import load, read_tensors, save
from trimtab.checkpoint.folder import read_index
from trimtab.convert.convert import convert
from trimtab.convert.files import SafetensorsFolder

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", family_names())
def test_every_family_arrives(name: str, tmp_path: Path) -> None:
    """The conversion itself proves the way back, on what it wrote."""
    model = build_model(name)
    model.save_pretrained(tmp_path / "hf")
    done = convert(tmp_path / "hf", tmp_path / "dcp", to="dcp")
    read = {key.removeprefix("model."): tensor for key, tensor in read_tensors(done.folder).items()}
    assert_same(state_of(model), read)  # the truth: the model that was saved
    assert done.experts


CASES = [*((name, torch.float32) for name in FAMILIES), *((name, torch.bfloat16) for name in FAMILIES[-2:])]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_there_and_back_with_equal_dims(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = build(name, dtype=dtype, experts=8)
    model.save_pretrained(tmp_path / "hf")
    there = convert(tmp_path / "hf", tmp_path / "dcp", to="dcp")
    other = build(name, seed=1, dtype=dtype, experts=8)
    load(tmp_path / "dcp", other)
    assert_same(state_of(model), state_of(other))
    back = convert(tmp_path / "dcp", tmp_path / "again", to="safetensors")
    assert_same(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "again"))
    assert (there.record.source_hash, there.record.hash) == (back.record.hash, back.record.source_hash)
    assert back.recorded
    opened, report = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=dtype, output_loading_info=True)
    assert not any(report.values()), report
    got = state_of(opened)  # transformers widens what must stay float32
    assert_same({name: tensor.to(got[name].dtype) for name, tensor in state_of(model).items()}, got)
    assert torch.equal(logits(model), logits(opened))


def test_trained_checkpoints_open_in_plain_transformers(tmp_path: Path) -> None:
    """As a run leaves it: with optimizer state, which is left behind, and a configuration that names no class."""
    model = build("qwen3_moe")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=torch.arange(12)[None], labels=torch.arange(12)[None]).loss.backward()
    optimizer.step()
    for step in (1, 2):
        model.config.architectures = None
        save(tmp_path / "run", model, optimizer, step=step)
    done = convert(tmp_path / "run", tmp_path / "hf", to="safetensors")
    entries, nbytes = done.optimizer
    parameters = sum(1 for _ in model.parameters())
    assert entries >= 2 * parameters
    assert nbytes >= 8 * sum(p.numel() for p in model.parameters())
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(opened) is type(model)
    assert torch.equal(logits(model), logits(opened))


def test_several_files_with_an_index(tmp_path: Path) -> None:
    model = build("mixtral")
    save(tmp_path / "run", model, step=3)
    done = convert(tmp_path / "run", tmp_path / "hf", to="safetensors", shard_bytes=9_000)
    files = [name for name in done.files if name.endswith(".safetensors")]
    assert len(files) > 3
    assert all((tmp_path / "hf" / name).stat().st_size < 9_000 + 8_000 for name in files)  # a header of up to 8 kB
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    folder = SafetensorsFolder(tmp_path / "hf")
    assert_same(tensors_of(tmp_path / "hf"), folder.read(list(folder.infos)))
    assert torch.equal(logits(model), logits(AutoModelForCausalLM.from_pretrained(tmp_path / "hf")))
    back = convert(tmp_path / "hf", tmp_path / "back", to="dcp")
    assert back.record.hash == done.record.source_hash


def test_weights_that_are_one_lie_once_in_safetensors_and_twice_in_a_checkpoint(tmp_path: Path) -> None:
    model = build("qwen3_moe", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "hf")
    assert "lm_head.weight" not in tensors_of(tmp_path / "hf")
    done = convert(tmp_path / "hf", tmp_path / "dcp", to="dcp")
    read = read_tensors(done.folder)
    assert torch.equal(read["model.lm_head.weight"], read["model.model.embed_tokens.weight"])
    load(tmp_path / "dcp", build("qwen3_moe", seed=1, tie_word_embeddings=True))
    convert(tmp_path / "dcp", tmp_path / "again", to="safetensors")
    assert_same(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "again"))


def test_tokenizer_and_configuration_come_along(tmp_path: Path) -> None:
    model = build("olmoe")
    model.save_pretrained(tmp_path / "hf")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "hf" / name).write_text(f'"{name}"')
    (tmp_path / "hf" / "notes.txt").write_text("not the model's")
    convert(tmp_path / "hf", tmp_path / "dcp", to="dcp")
    done = convert(tmp_path / "dcp", tmp_path / "again", to="safetensors")
    assert done.files == [
        "chat_template.jinja", "config.json", "convert.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert (tmp_path / "again" / "tokenizer.json").read_text() == '"tokenizer.json"'
    assert PretrainedConfig.from_pretrained(tmp_path / "again").architectures == ["OlmoeForCausalLM"]


def test_the_record_and_the_index_say_what_is_there(tmp_path: Path) -> None:
    build("gpt_oss", experts=4).save_pretrained(tmp_path / "hf")
    done = convert(tmp_path / "hf", tmp_path / "dcp", to="dcp")
    record: dict[str, Any] = json.loads((done.folder / "convert.json").read_text())
    assert (record["source_hash"], record["hash"]) == (done.record.source_hash, done.record.hash)
    index = read_index(done.folder)
    assert index.experts["model.layers.1.mlp.experts"]["gate_up_proj"] == [4, 16, 32]
    assert (index.step, index.world) == (0, 0)


def test_progress_is_told_to_the_end(tmp_path: Path) -> None:
    build("mixtral").save_pretrained(tmp_path / "hf")
    told: list[tuple[int, int]] = []
    convert(tmp_path / "hf", tmp_path / "dcp", to="dcp", on_tensor=lambda done, total: told.append((done, total)))
    assert told == [(i + 1, len(told)) for i in range(len(told))]
