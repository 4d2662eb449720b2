"""What becomes of a checkpoint: all of it comes back, trained or as it was, and what cannot is refused before."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from helpers.forked import run_forked
from helpers.ranks import run_ranks
from trimtab.cli.main import main
from trimtab.errors import ConfigError, InputError
from trimtab.train.config import TrainConfig
from trimtab.train.loading import check_finite, load_model
from trimtab.train.models import inspect, with_adapters
from trimtab.train.out_folder import make_room
from trimtab.train.plan import check_kept, plan_run
from trimtab.train.resume import resumed
from trimtab.train.session import _save
from trimtab.train.weights import copy_files, open_source, write_model, write_plain

SMALL = {
    "vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "eos_token_id": 256, "max_position_embeddings": 64,
}  # fmt: skip
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32, "patch_size": 4,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("qwen3_moe", SMALL | {"head_dim": 16, "num_experts": 4, "tie_word_embeddings": True}),
    "mtp": (
        "deepseek_v3",
        SMALL | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8,
                 "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    ),
    "composite": (
        "qwen3_5_moe",
        {"text_config": SMALL | LINEAR | {"head_dim": 16, "num_experts": 4, "shared_expert_intermediate_size": 16,
                                          "layer_types": ["linear_attention", "full_attention"]},
         "vision_config": VISION},
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bfloat16 with more in it than its language model."""
    import transformers

    kind, fields = FAMILIES[request.param]
    config = AutoConfig.for_model(kind, **fields)
    composite = request.param == "composite"
    build = transformers.Qwen3_5MoeForConditionalGeneration if composite else AutoModelForCausalLM.from_config
    folder = tmp_path_factory.mktemp(request.param)
    build(config).bfloat16().save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors |= {"v_head.summary.weight": torch.randn(1, 32), "model.layers.2.enorm.weight": torch.randn(32).half()}
    tensors |= {f"mtp.layers.0.mlp.experts.{e}.gate_proj.weight": torch.randn(8, 8) for e in range(3)}
    if request.param == "tied":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    more = ("value_head.bin", "convert.json", "old.gguf", "original/consolidated.pth")
    for name in ("LICENSE", "tool_use.jinja", "additional_chat_templates/rag.jinja", *more):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_what_is_not_trained_comes_back_bit_for_bit(source: Path, tmp_path: Path) -> None:
    """Names, dtypes, bits, configuration and files: of vision towers, MTP layers, value heads, repeated ties."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    skeleton = inspect(str(source))
    (tmp_path / "final").mkdir()
    opened = open_source(source, skeleton)
    assert {"v_head.summary.weight", "model.layers.2.enorm.weight"} < set(opened.carried)
    assert "kept as they are" in opened.summary
    assert opened.summary.endswith("; not kept: old.gguf, original")
    write_model(model, opened, tmp_path / "final", dtype=None, write=True)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "final"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "final")]
    assert configs[0] == configs[1]
    names = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    written = {str(path.relative_to(tmp_path / "final")) for path in (tmp_path / "final").rglob("*") if path.is_file()}
    assert names - written == {"convert.json", "old.gguf", "original/consolidated.pth"}
    assert written < names


def test_what_is_dropped_and_the_dtype_that_is_asked_for(source: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    opened = open_source(source, inspect(str(source)), ("mtp.*", "*.jinja"))
    assert "3 tensors are dropped: mtp.layers" in opened.summary
    write_model(model, opened, tmp_path, dtype="float16", write=True)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path))
    assert {name for name in before if name not in after} == {name for name in before if name.startswith("mtp.")}
    assert after["v_head.summary.weight"].dtype == torch.float32
    assert after[next(name for name in after if name.endswith("embed_tokens.weight"))].dtype == torch.float16
    assert (tmp_path / "LICENSE").exists()
    assert not list(tmp_path.glob("*.jinja"))
    with pytest.raises(InputError, match=r"lacks 1 weights of \w+, among them model\.norm\.weight"):
        open_source(source, inspect(str(source)), ("*model.norm.weight", "*language_model.norm.weight"))


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def config_of(folder: Path, out: Path, **more: Any) -> TrainConfig:
    values: dict[str, Any] = {"seq_len": 16, "max_steps": 1, "batch_size": 1}
    return TrainConfig(model=str(folder), out=str(out), **values, **more)


def test_files_that_are_not_whole_are_named_before_a_rank_starts(copy: Path, tmp_path: Path) -> None:
    file, config = copy / "model.safetensors", config_of(copy, tmp_path / "run")
    whole, expert = load_file(file), "model.layers.1.mlp.experts.2.up_proj.weight"
    for without, words in {
        expert: r"layers\.1\.mlp\.experts\.gate_up_proj: .* 4 experts, .* has 3 .* missing: 2",
        "model.norm.weight": r"lacks 1 weights of Qwen3MoeForCausalLM, among them model\.norm\.weight",
    }.items():
        save_file({n: t for n, t in whole.items() if n != without}, file, metadata={"format": "pt"})
        with pytest.raises(InputError, match=words):
            plan_run(config, 2)
    save_file(whole, file, metadata={"format": "pt"})
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"model\.safetensors: not a whole safetensors file"):
        plan_run(config, 2)
    file.rename(copy / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="no weights in safetensors"):
        plan_run(config, 2)


@pytest.mark.parametrize("kind", ["link", "pipe", "socket", "cache", "template"])
def test_a_file_that_cannot_go_along_is_named_before_a_rank_starts(copy: Path, tmp_path: Path, kind: str) -> None:
    name = "additional_chat_templates" if kind == "template" else "NOTICE"
    if kind == "pipe":
        os.mkfifo(copy / name)
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(os.path.relpath(copy / name))
    elif kind == "template":
        (copy / name).mkdir()
        (copy / name / "rag.jinja").symlink_to("gone.jinja")
    elif kind == "link":
        (copy / name).symlink_to("LICENSE-2.0")
    else:  # of the Hub, whose cache was cleaned
        (tmp_path / "hub" / "snapshots").mkdir(parents=True)
        copy = copy.rename(tmp_path / "hub" / "snapshots" / "0123")
        (copy / name).symlink_to("../../blobs/4567")
    config = config_of(copy, tmp_path / "run")
    with pytest.raises(ConfigError, match=rf"{name}.*: goes with the weights.* or leave it out by --drop {name}"):
        plan_run(config, 1)
    assert not (tmp_path / "run").exists()
    plan_run(replace(config, drop=(name,)), 1)


def test_links_out_of_the_folder_are_not_copied(copy: Path, tmp_path: Path) -> None:
    """But for files that a model consists of, and those of the Hub's cache."""
    (tmp_path / "private.txt").write_text("private")
    (copy / "notes.txt").symlink_to(tmp_path / "private.txt")
    (copy / "gone.txt").symlink_to("../../elsewhere")
    (copy / "LICENSE").write_text("free")
    (copy / "COPYING").symlink_to("LICENSE")
    (copy / "additional_chat_templates").mkdir()
    (copy / "additional_chat_templates" / "rag.jinja").symlink_to(tmp_path / "private.txt")
    (copy / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (copy / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    opened = open_source(copy, inspect(str(copy)))
    names = {path.name for path in opened.files}
    assert {"config.json", "tokenizer.json", "LICENSE", "COPYING"} < names
    assert not names & {"notes.txt", "gone.txt", "rag.jinja"}
    for name in ("notes.txt", "gone.txt", "additional_chat_templates/rag.jinja"):
        assert f"{name} (a link that leads out of the folder)" in opened.summary
    (tmp_path / "hub" / "blobs").mkdir(parents=True)
    (tmp_path / "hub" / "snapshots").mkdir()
    cached = copy.rename(tmp_path / "hub" / "snapshots" / "0123")
    (cached / "LICENSE").rename(tmp_path / "hub" / "blobs" / "89")
    (cached / "LICENSE").symlink_to("../../blobs/89")
    link = tmp_path / "model"
    link.symlink_to(cached)
    copy_files(open_source(link, inspect(str(link))).files, link, tmp_path / "hub", None)
    assert (tmp_path / "hub" / "LICENSE").read_text() == "free"
    assert (tmp_path / "hub" / "COPYING").read_text() == "free"
    assert not (tmp_path / "hub" / "notes.txt").exists()


@pytest.mark.parametrize(
    ("more", "times"),
    [
        ({}, 1.0), ({"save_dtype": "bfloat16"}, 0.5), ({"max_steps": 6, "save_every": 2}, 10.0),
        ({"max_steps": 6, "save_every": 1, "keep": 1}, 7.0), ({"max_steps": 6, "stop_after": 2}, 3.0),
        ({"lora": 2, "merge": True, "lora_targets": "experts"}, 1.0), ({"lora": 2, "lora_targets": "experts"}, 0.1),
        ({"model": "olmoe", "seq_len": 16}, 2.0),
    ],
)  # fmt: skip
def test_a_disk_without_room_is_found_out_before_the_first_step(
    copy: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    more: dict[str, Any], times: float,
) -> None:  # fmt: skip
    """What final/, merged/, the first weights of a preset and the checkpoints need, in multiples of the model."""
    config = replace(config_of(copy, tmp_path / "run", data=(str(text),)), **more)
    plan = plan_run(config, 1)
    size = 4 * sum(p.numel() for p in plan.skeleton.parameters())
    usage = shutil.disk_usage(tmp_path)
    for free, enough in ((times * size + (1 << 18), True), (times * size * 0.95, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=int(free)))
        if enough:
            make_room(plan).close()
            assert " MB are needed for what the run ends with and " in capsys.readouterr().err
            shutil.rmtree(tmp_path / "run")
        else:
            with pytest.raises(ConfigError, match=r"MB are needed .*, [\d.]+ MB are free; make room"):
                make_room(plan)
            assert not (tmp_path / "run").exists(), "nothing is left"


def test_what_an_earlier_run_left_counts_as_room(
    copy: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config_of(copy, tmp_path / "run", data=(str(text),)), overwrite=True)
    make_room(plan_run(config, 1)).close()
    shutil.copytree(copy, tmp_path / "run" / "final")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 17))
    make_room(plan_run(config, 1)).close()
    assert not (tmp_path / "run" / "final").exists()
    shutil.copytree(copy, tmp_path / "run" / "checkpoints" / "step-00000009")  # which has no index and is not whole
    make_room(plan_run(config, 1)).close()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_file_system_that_does_not_say_its_room_is_written_to(
    copy: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(total=0, used=0, free=0))
    make_room(plan_run(config_of(copy, tmp_path / "run", data=(str(text),)), 1)).close()
    assert "checkpoint(s), the disk does not say its room" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["copied", "weights", "adapter"])
def test_what_was_not_named_in_the_end_is_named_with_the_way_to_use_it(
    copy: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:  # fmt: skip
    out, more = tmp_path / "run", {"lora": 2, "lora_targets": "experts", "merge": True} if way == "adapter" else {}
    config = config_of(copy, out, data=(str(text),), **more)
    plan = plan_run(config, 1)
    places = {"copied": "train.weights.copy_files", "weights": "convert.tensors.TensorStore.blocks"}
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(f"trimtab.{places.get(way, 'train.session.write_merged')}", full)
    model = load_model(copy, plan.config, plan.mesh)
    if way == "adapter":
        model = with_adapters(model, plan.config)
    shutil.rmtree(copy)  # the folder has gone while the run was trained
    out.mkdir()
    with pytest.raises(InputError, match="No space left") as error:
        _save(model, plan, 0)
    said, kept = str(error.value), out / "final.unfinished"
    if way == "weights":
        assert f"{kept} holds a part of the weights, which no program opens" in said
        return
    assert f"{kept} holds all that was trained: " in said
    assert f"name it {out / 'final'}" in said
    with pytest.raises(InputError, match=r"no checkpoint there; .* holds all that was trained"):
        resumed({"resume": str(out)})
    (out / "run.json").touch()
    with pytest.raises(ConfigError, match=r"holds a model \(.*final.unfinished holds all.*--overwrite remove it"):
        check_kept(config)
    for path in kept.iterdir():  # as a kill leaves it, perhaps in the size that it will have
        if path.suffix != ".safetensors":
            path.unlink()
    with pytest.raises(InputError, match=r"final\.unfinished holds a part of the weights"):
        resumed({"resume": str(out)})
    check_kept(config)


def saved_into_trouble(copy: Path, data: str, folder: Path) -> list[str]:
    """What this rank raises as the run ends, where rank 0 can write no large file, no folder, no merged weights."""
    said, size, first = [], resource.getrlimit(resource.RLIMIT_FSIZE)[1], dist.get_rank() == 0
    for way in ("full", "blocked", "merge"):
        out, more = folder / way, {"lora": 2, "lora_targets": "experts", "merge": True} if way == "merge" else {}
        plan = plan_run(config_of(copy, out, data=(data,), ep=1 if more else 2, **more), 2)
        model = load_model(copy, plan.config, plan.mesh)
        model = with_adapters(model, plan.config) if more else model
        if first:
            out.mkdir()
            (out / f"{'merged' if more else 'final'}.unfinished").touch() if way != "full" else None
            resource.setrlimit(resource.RLIMIT_FSIZE, (9_000 if way == "full" else size, size))
        try:
            _save(model, plan, dist.get_rank())
        except InputError as error:
            said.append(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return said


def test_what_rank_0_cannot_write_ends_every_rank_with_the_same_words(copy: Path, text: Path, tmp_path: Path) -> None:
    one, other = run_ranks(saved_into_trouble, 2, copy, str(text), tmp_path, deadline=120)
    assert one == other
    full, blocked, merge = one
    assert full.startswith(f"rank 0: {tmp_path}/full/final.unfinished/model.safetensors: cannot be written: ")
    assert "files of 0.0 MB at most (ulimit -f)" in full
    assert f"{tmp_path}/full/final.unfinished holds a part of the weights" in full
    assert blocked.startswith("rank 0: FileExistsError: ")
    assert f"{tmp_path}/blocked/final.unfinished" in blocked
    assert merge.startswith(f"rank 0: {tmp_path}/merge/final.unfinished: cannot be written: ")
    assert "merged.unfinished" in merge


@pytest.mark.parametrize("alone", [False, True])
def test_an_adapter_beside_the_weights_is_refused_and_merged_by_the_way_that_is_named(
    copy: Path, tmp_path: Path, alone: bool
) -> None:
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(copy)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    folder = tmp_path / "adapter" if alone else copy
    adapted.save_pretrained(folder)
    for more in ({}, {"lora": 2}):
        with pytest.raises(ConfigError, match=rf"--model {folder}: an adapter lies .* train the merged") as error:
            plan_run(config_of(folder, tmp_path / "run", **more), 1)
    if not alone:
        (tmp_path / "adapter").mkdir()
        for path in copy.glob("adapter_*"):
            path.rename(tmp_path / "adapter" / path.name)
    places = {"BASE": copy, "MERGED": tmp_path / "merged", "ADAPTER": tmp_path / "adapter"}
    command = str(error.value).rpartition(": trimtab ")[2].split()
    assert main([str(places.get(word, word)) for word in command]) == 0
    plan_run(config_of(tmp_path / "merged", tmp_path / "run"), 1)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    wanted = adapted.merge_and_unload().state_dict()
    assert all(torch.equal(merged[name], value) for name, value in wanted.items())


def test_weights_that_are_no_numbers_are_not_blamed_on_the_learning_rate(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    check_finite(model, "here")
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight[2, 3] = float("nan")
    with pytest.raises(ConfigError, match=r"NaN or infinity in 1 weights .*: model\.layers\.1\.mlp\.gate\.weight"):
        check_finite(model, "here")


def to_fp8(folder: Path, block: int = 12) -> dict[str, torch.Tensor]:
    """Quantize a checkpoint's products by blocks that do not divide them; returns the values that it then holds."""
    tensors, values = load_file(folder / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        if weight.dim() != 2 or not name.endswith("_proj.weight"):
            values[name] = weight
            continue
        grid = [-(-size // block) for size in weight.shape]
        scale = (torch.rand(grid) + 0.5) / 64
        whole = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[: weight.shape[0], : weight.shape[1]]
        tensors[name], tensors[f"{name}_scale_inv"] = (weight / whole).to(torch.float8_e4m3fn), scale
        values[name] = (tensors[name].float() * whole).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantized = {"quant_method": "fp8", "weight_block_size": [block, block], "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantized, "dtype": "bfloat16"}))
    return values


def test_fp8_trains_on_two_ranks_and_says_what_it_becomes(
    copy: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values, out = to_fp8(copy), tmp_path / "run"
    config = config_of(copy, out, data=(str(text),))
    make_room(plan_run(config, 2)).close()
    assert "weights in FP8 become bfloat16" in capsys.readouterr().err
    run_forked(config, 2)
    began = load_file(out / "init" / "model.safetensors")
    assert began.keys() == values.keys()
    assert all(torch.equal(began[name], values[name]) for name in values)
    after = load_file(out / "final" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in after.items()} == {name: t.dtype for name, t in began.items()}
    assert any(not torch.equal(after[name], began[name]) for name in values)
    written = json.loads((out / "final" / "config.json").read_text())
    assert "quantization_config" not in written
    assert not (out / "final" / "init.json").exists()
    AutoModelForCausalLM.from_pretrained(out / "final")


def test_fp8_has_scales_of_blocks_of_experts_or_of_whole_tensors(tmp_path: Path) -> None:
    codes = torch.randn(3, 20, 30).to(torch.float8_e4m3fn)
    scales = {"blocks": torch.rand(3, 2, 3) + 0.5, "experts": torch.rand(3) + 0.5, "whole": torch.tensor(0.7)}
    tensors = {name: codes.clone() for name in scales} | {f"{name}_scale_inv": scale for name, scale in scales.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [12, 12]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_plain(tmp_path, tmp_path / "plain")
    found = load_file(tmp_path / "plain" / "model.safetensors")
    of_blocks = scales["blocks"].repeat_interleave(12, 1).repeat_interleave(12, 2)[:, :20, :30]
    for name, scale in {**scales, "blocks": of_blocks, "experts": scales["experts"][:, None, None]}.items():
        assert torch.equal(found[name], (codes.float() * scale).bfloat16()), name


def test_mxfp4_has_the_values_that_transformers_gives_it(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (3, 8, 2, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (3, 8, 2), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks.clone(), scales.clone())
    tensors = {"a.down_proj_blocks": blocks, "a.down_proj_scales": scales, "a.down_proj_bias": torch.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    write_plain(tmp_path, tmp_path / "plain")
    written = load_file(tmp_path / "plain" / "model.safetensors")
    assert written.keys() == {"a.down_proj", "a.down_proj_bias"}
    assert torch.equal(written["a.down_proj"], expected)
    del tensors["a.down_proj_scales"]
    save_file(tensors | {"b.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"codes without scales in a\.down_proj_blocks, b\.weight"):
        write_plain(tmp_path, tmp_path / "bare")
    save_file({"a.w": torch.ones(2, 2), "a.w_scale_inv": torch.ones(1, 1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"a\.w has scales, but is float32 \[2, 2\] and not float8_e4m3fn"):
        write_plain(tmp_path, tmp_path / "odd")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    with pytest.raises(ConfigError, match="quantized by gptq; train the plain weights"):
        write_plain(tmp_path, tmp_path / "other")
