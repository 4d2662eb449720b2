"""`trimtab train --lora`: adapters alone are learned, saved and gone on with, on one rank and on two."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from helpers.coded_checkpoints import save_official, tiny
from helpers.forked import run_forked
from helpers.train_runs import assert_same_bits, assert_same_run, log
from trimtab.checkpoint import read_tensors
from trimtab.cli.main import main
from trimtab.errors import ConfigError
from trimtab.integrations.transformers.quantized.quantizer import experts_in
from trimtab.integrations.transformers.summary import SHARDED
from trimtab.kernels.choose import get_backend
from trimtab.train.config import Mesh, TrainConfig
from trimtab.train.models import inspect, packed, trained_skeleton
from trimtab.train.plan import plan_run
from trimtab.train.resume import check_resume, resumed
from trimtab.train.sources import find_groups

peft = pytest.importorskip("peft")
ADAPTER = "adapter_model.safetensors"
ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.xdist_group("train_adapters")


@pytest.fixture(scope="module")
def config(text: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """Four steps of two batches from a preset, all kinds of targets that it has."""
    return TrainConfig(
        model="deepseek_v3", data=(str(text),), seq_len=32, batch_size=2, grad_accum=2, max_steps=4, lr=0.01, lora=2,
        lora_targets="experts,attention,router,shared", quantize="int8", save_every=2, merge=True,
        out=str(tmp_path_factory.mktemp("lora") / "alone"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone(config: TrainConfig) -> Path:
    run_forked(config, 1)
    return Path(config.out)


@pytest.fixture(scope="module")
def pair(config: TrainConfig, alone: Path) -> Path:
    """The same global batch on two ranks that share the experts, stopped in the middle and gone on with."""
    out = alone.with_name("pair")
    given = replace(config, out=str(out), batch_size=1, ep=2)
    run_forked(replace(given, save_every=None, stop_after=2, merge=False), 2)
    run_forked(resumed({"resume": str(out), "save_every": 2}), 2)
    return out


def test_two_and_two_steps_are_four(config: TrainConfig, alone: Path) -> None:
    out = alone.with_name("parts")
    run_forked(replace(config, out=str(out), stop_after=2), 1)
    assert not (out / "final").exists()
    run_forked(resumed({"resume": str(out)}), 1)
    assert_same_bits(out, alone, 4, ADAPTER)
    keys = read_tensors(out / "checkpoints" / "step-00000004").keys()
    assert all(".lora_" in key for key in keys)  # and nothing of the base


def test_two_and_two_steps_are_four_on_two_ranks(config: TrainConfig, pair: Path) -> None:
    out = pair.with_name("whole")
    run_forked(replace(config, out=str(out), batch_size=1, ep=2, merge=False), 2)
    assert_same_bits(pair, out, 4, ADAPTER)


def assert_same_adapters(two_ranks: Path, alone: Path) -> None:
    assert_same_run(two_ranks, alone, norm=1e-4)
    ours, theirs = (load_file(out / "final" / ADAPTER) for out in (two_ranks, alone))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.nn.functional.cosine_similarity(ours[name].flatten(), value.flatten(), dim=0) > 0.9999, name


def test_two_ranks_have_the_numbers_of_one_process(alone: Path, pair: Path) -> None:
    assert_same_adapters(pair, alone)


def test_nf4_over_data_parallel_and_over_tensor_parallel_ranks(text: Path, tmp_path: Path) -> None:
    config = TrainConfig(
        model="mixtral", data=(str(text),), seq_len=16, batch_size=2, max_steps=2, lr=0.01, lora=2, quantize="nf4",
        lora_targets="experts", out=str(tmp_path / "alone"),
    )  # fmt: skip
    run_forked(config, 1)
    for way in ({"ep": 2, "batch_size": 1}, {"ep": 2, "tp": 2}):
        given = replace(config, out=str(tmp_path / "-".join(way)), **way)
        run_forked(given, 2)
        assert_same_adapters(Path(given.out), Path(config.out))
        (row,) = (line.split() for line in log(Path(given.out)).splitlines() if line.startswith("routed experts"))
        assert row[-3] == f"{3 * 3 * 8 * 128 * 192:,}", "codes, on all ranks"
        assert SHARDED in log(Path(given.out))
    assert SHARDED not in log(Path(config.out))


@pytest.fixture
def compiled() -> None:
    if get_backend("auto", torch.device("cpu")).name != "cpu":
        pytest.skip("C++ does not compile here")


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("layout", [{}, {"ep": 2}, {"ep": 2, "tp": 2}, {"ep": 1, "dtype": "bfloat16"}], ids=str)
def test_a_frozen_base_is_packed_unasked_with_the_same_bits(layout: dict[str, Any], text: Path, tmp_path: Path) -> None:
    outs = [tmp_path / "packed", tmp_path / "plain"]
    config = TrainConfig(
        model="mixtral", data=(str(text),), seq_len=16, batch_size=2, max_steps=2, lr=0.01, lora=2, save_every=1,
        lora_targets="experts", merge=True, **layout,
    )  # fmt: skip
    for out in outs:
        run_forked(replace(config, out=str(out)), 2 if layout else 1, plain=out == outs[1])
        assert ("'packed'" in log(out)) == (out == outs[0])
    assert_same_bits(*outs, 2, ADAPTER)
    of_both = [load_file(next((out / "merged").glob("*.safetensors"))) for out in outs]
    assert all(torch.equal(tensor, of_both[1][name]) for name, tensor in of_both[0].items())


@pytest.mark.usefixtures("compiled")
def test_who_is_packed_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    config, skeleton = TrainConfig(model="mixtral", lora=2), inspect("mixtral")
    mesh = Mesh.of(config, world=2, num_experts=8)
    codes = replace(config, quantize="packed")
    assert packed(config, skeleton, mesh) == packed(config, skeleton, mesh, "cpu") == codes
    assert packed(config, skeleton, mesh, "cuda") == config
    assert trained_skeleton(tiny("mixtral").half(), codes.resolved()), "whatever they are in the checkpoint"
    for given in ({"lora": None}, {"quantize": "int8"}, {"kernels": "torch"}):
        asked = replace(config, **given)
        assert packed(asked, skeleton, mesh) == asked
    assert packed(config, skeleton, replace(mesh, tp=2, ep=1)) == config
    normed = tiny("mixtral")
    for module in experts_in(normed):
        module.has_post_expert_norm = True
    assert packed(config, normed, mesh) == config, "C++ would leave it to blocks"
    assert not capsys.readouterr().err
    assert packed(config, tiny("mixtral", hidden=40), mesh) == config
    assert "experts are not packed: --quantize packed: packed has blocks of 32" in capsys.readouterr().err


def test_what_trains_is_said_first(alone: Path, pair: Path) -> None:
    for out in (alone, pair):
        assert (SHARDED in log(out)) == (out == pair), "whose bytes they are, where others have some"
        rows = {line[:16].strip(): line[16:].split() for line in log(out).splitlines() if "B)" in line}
        assert list(rows) == ["router", "routed experts", "shared experts", "attention", "embeddings", "other", "all"]
        assert all(rows[kind][0] != "-" for kind in ("router", "routed experts", "shared experts", "attention"))
        assert rows["routed experts"][3] == "-"
        assert rows["routed experts"][4] == f"{2 * 3 * 16 * 128 * 96:,}", "codes of two layers, on all ranks"


def test_the_adapter_is_pefts_and_merged_it_is_a_checkpoint(alone: Path) -> None:
    """On the plain weights, by peft alone: its own merge has the values of ours."""
    base = AutoModelForCausalLM.from_pretrained(alone / "init", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, alone / "final")
    assert model.peft_config["default"].base_model_name_or_path == str((alone / "init").resolve())
    trained = {name: p for name, p in model.named_parameters() if "lora_B" in name}
    assert all(p.any() for p in trained.values())
    wanted = model.merge_and_unload().state_dict()
    got = AutoModelForCausalLM.from_pretrained(alone / "merged", dtype=torch.float32).state_dict()
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], value) for name, value in wanted.items())
    assert "64 of 64 experts' matrices" in log(alone)
    assert f"model   {alone / 'merged'}" in log(alone)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"lora": None}, ["--lora-targets experts", "goes with --lora"]),
        ({"lora": 0}, ["--lora 0", "at least 1"]),
        ({"lora_alpha": -1.0}, ["--lora-alpha -1.0", "positive"]),
        ({"lora_targets": "experts,w1"}, ["--lora-targets w1: DeepseekV3ForCausalLM has nothing", "mlp.experts.down"]),
        ({"lora_targets": "up_proj"}, ["shared ones alone", "no routed one", "experts: mlp.experts"]),
        (
            {"lora_targets": "shared", "model": "mixtral"},
            ["shared: MixtralForCausalLM has nothing", "router: mlp.gate"],
        ),
        ({"quantize": "keep"}, ["--quantize keep", "no codes"]),
        ({"quantize": "nf4"}, ["--quantize nf4", "blocks of 64 inputs", "down_proj has 96"]),
        ({"quantize": "fp8"}, ["--quantize fp8", "nf4, int8, packed, keep"]),
        ({"tp": 2}, ["--lora with --tp 2", "--lora-targets experts"]),
        ({"tp": 2, "ep": 1, "lora_targets": "experts"}, ["--quantize with --tp 2 and --ep 1"]),
        ({"replicate": 2}, ["--lora with --replicate 2", "--lora-targets experts"]),
    ],
    ids=lambda value: "-".join(value),
)
def test_what_cannot_be_is_refused_before_a_rank_starts(
    config: TrainConfig, given: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        plan_run(replace(config, out=str(tmp_path / "run"), **given), 2)
    for part in parts:
        assert part in str(error.value)


def test_other_weights_below_are_refused(config: TrainConfig, checkpoint: Path, tmp_path: Path) -> None:
    model = shutil.copytree(checkpoint, tmp_path / "model")
    given = replace(config, model=str(model), lora_targets="attention", quantize=None, merge=False, max_steps=2)
    run_forked(replace(given, out=str(tmp_path / "run"), save_every=1), 1)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000002")
    more = resumed({"resume": str(tmp_path / "run")})
    check_resume(more, 1, find_groups(more.data))
    with (model / "model.safetensors").open("ab") as file:
        file.write(b" ")
    with pytest.raises(ConfigError, match=r"weights are not those that .* was trained over"):
        check_resume(more, 1, find_groups(more.data))


def test_a_dry_run_says_what_would_train(config: TrainConfig, tmp_path: Path) -> None:
    plan = plan_run(replace(config, lora_targets="experts", out=str(tmp_path)), 1)
    said = "\n".join(plan.described())
    assert "routed experts" in said
    kinds = {line[:14]: line[14:].split() for line in said.splitlines()}
    assert kinds["routed experts"][0] == f"{2 * 16 * 2 * (128 + 192 + 128 + 96):,}"
    assert kinds["routed experts"][4] == f"{2 * 3 * 16 * 128 * 96:,}"
    assert kinds["attention     "][0] == "-"


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_codes_of_a_checkpoint_are_kept_and_merged_into_weights(kind: str, text: Path, tmp_path: Path) -> None:
    from trimtab.train.presets import byte_tokenizer

    base = save_official(tmp_path / "base", kind, vocab_size=264)
    byte_tokenizer().save_pretrained(base)
    given: dict[str, Any] = {"seq_len": 32, "batch_size": 2, "max_steps": 1, "lora": 2, "quantize": "keep"}
    out = tmp_path / "run"
    run_forked(TrainConfig(model=str(base), data=(str(text),), out=str(out), merge=True, dtype="bfloat16", **given), 1)
    assert not (out / "init").exists()
    (row,) = (line.split() for line in log(out).splitlines() if line.startswith("routed experts"))
    assert row[-3] == f"{2 * 3 * 4 * 256 * 128:,}"
    merged = AutoModelForCausalLM.from_pretrained(out / "merged")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    adapter = peft.PeftModel.from_pretrained(plain, out / "final").merge_and_unload()
    for name, value in adapter.state_dict().items():
        assert torch.equal(merged.state_dict()[name], value), name


@pytest.mark.parametrize("targets", ["experts,attention", "experts", "self_attn.q_proj,shared,router"])
def test_adapters_of_a_composite_model_act_on_all_of_it(text: Path, tmp_path: Path, targets: str) -> None:
    """By peft on the whole model, as merged/ does, and merged by `trimtab convert`; its tower is left alone."""
    from transformers import AutoModelForImageTextToText, Qwen3_5MoeConfig

    from trimtab.train.presets import byte_tokenizer

    sizes = {
        "vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 16, "max_position_embeddings": 512, "eos_token_id": 256,
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0],
                            "partial_rotary_factor": 0.5},
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    base, out = tmp_path / "base", tmp_path / "run"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        whole = AutoModelForImageTextToText.from_config(Qwen3_5MoeConfig(text_config=sizes, vision_config=vision))
    whole.save_pretrained(base)
    byte_tokenizer().save_pretrained(base)
    given: dict[str, Any] = {"seq_len": 32, "batch_size": 2, "max_steps": 2, "lr": 0.05, "lora": 2, "merge": True}
    run_forked(TrainConfig(model=str(base), data=(str(text),), out=str(out), lora_targets=targets, **given), 1)
    assert "those of Qwen3_5MoeForConditionalGeneration, the whole model" in log(out)
    ids = torch.arange(12)[None]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # peft's, of keys that are missing
        before = whole.eval()(input_ids=ids).logits
        adapted = peft.PeftModel.from_pretrained(whole, out / "final").eval()
        merged = AutoModelForImageTextToText.from_pretrained(out / "merged").eval()
        found, wanted = (model(input_ids=ids).logits for model in (adapted, merged))
    assert not torch.allclose(before, wanted, atol=1e-3)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    assert not any("visual" in name for name, p in adapted.named_parameters() if "lora_" in name)
    command = ["convert", base, tmp_path / "converted", "--to", "safetensors", "--merge", out / "final"]
    assert main([str(each) for each in command]) == 0
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "converted", out / "merged"))
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_the_scripts_of_the_page_run_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Behind a command of the page, in this process: more of their own would import TRL anew."""
    page = (ROOT / "docs/howto/adapters.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", page.replace("\\\n", ""), re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    (train,) = (line for line in lines if "--lora" in line)
    scripts = [line for line in lines if line[0] == "python"]
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text("".join(json.dumps({"text": f"Line {i} of a few."}) + "\n" for i in range(8)))
    base = ["train", "--model", "mixtral", "--max-steps", "5", "--batch-size", "4", "--out", "runs/first"]
    with torch.random.fork_rng():
        assert main(base) == 0
        assert main(train[1:]) == 0
        for line in scripts:
            monkeypatch.setattr(sys, "argv", line[1:])
            runpy.run_path(str(ROOT / line[1]), run_name="__main__")
    tables = [row.split() for row in capsys.readouterr().out.splitlines() if row.startswith("routed experts")]
    assert len(tables) == 4
    assert all(row[2] != "-" and row[-3] == "1,769,472" for row in tables[1:]), "adapters trained, codes below"
    for out in ("lora/final", "sft", "grpo"):
        saved = load_file(f"runs/{out}/adapter_model.safetensors")
        assert {".experts." in name for name in saved} == {True, False}
        assert any(t.any() for name, t in saved.items() if "lora_B" in name)
    merged = AutoModelForCausalLM.from_pretrained("runs/lora/merged")
    assert sum(p.numel() for p in merged.parameters()) == 2_037_632
