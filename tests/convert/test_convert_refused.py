"""Spoiled sources: each is refused in one sentence that says what is wrong, and nothing is left where it was to go."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from traceback import StackSummary
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

from helpers.convert_case import Tensors, build, rewrite_config, spoil
from trimtab import errors
from trimtab.checkpoint import read_tensors, save, write_tensors
from trimtab.convert import convert as module
from trimtab.convert.convert import convert
from trimtab.errors import ConfigError, InputError, TrimtabError

pytestmark = pytest.mark.usefixtures("one_thread")
Change = Callable[[Path], object]
EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"
ROLES = ("gate", "up", "down")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that transformers and trimtab.checkpoint wrote: `square` has D = F, `wide` has not, `run` is ours."""
    root = tmp_path_factory.mktemp("saved")
    build("qwen3_moe").save_pretrained(root / "square")
    build("qwen3_moe", moe_intermediate_size=12).save_pretrained(root / "wide")
    save(root / "run", build("qwen3_moe"), step=4)
    return root


def refused(src: Path, words: str, kind: type[TrimtabError] = InputError, *, to: str = "dcp", **more: Any) -> None:
    """Refused with these words; nothing is left."""
    dst = src.parent / "target"
    with pytest.raises(kind) as caught:
        convert(src, dst, to=to, **more)
    assert words in str(caught.value), str(caught.value)
    assert not dst.exists()
    assert not dst.with_name("target.unfinished").exists()


def tensors(change: Callable[[Tensors], object]) -> Change:
    """The folder's tensors changed."""
    return lambda folder: spoil(folder, lambda t: (change(t), None)[1])


def without(*names: str) -> Change:
    return tensors(lambda t: [t.pop(name) for name in names])


def with_more(**roles: int) -> Change:
    """An expert of a number that there is not, for each role."""
    return tensors(lambda t: t.update({EXPERT.format(n, r): t[EXPERT.format(0, r)].clone() for r, n in roles.items()}))


def turned(*names: str) -> Change:
    return tensors(lambda t: t.update({n: t[n].t() for n in names or [n for n in t if "experts" in n]}))


def zeros(name: str, *shape: int) -> Change:
    return tensors(lambda t: t.update({f"model.layers.{name}": torch.zeros(shape)}))


def renumbered(t: Tensors) -> None:
    """As many experts as there should be, but one of another number."""
    t.update({EXPERT.format(7, role): t.pop(EXPERT.format(3, role)) for role in ROLES})


def config(**fields: Any) -> Change:
    return lambda folder: rewrite_config(folder, **fields)


def named(name: str, text: str = "{}") -> Change:
    return lambda folder: (folder / name).write_text(text)


def renamed(name: str, more: str = "") -> Change:
    return lambda folder: [(folder / SINGLE).rename(folder / name), (folder / more).touch()]


def indexed(to: str, *shards: str, drop: str = "") -> Change:
    """Shards with all tensors each, and an index that says they are in `to`, without one."""

    def change(folder: Path) -> None:
        held = load_file(folder / SINGLE)
        (folder / SINGLE).unlink()
        for shard in shards:
            save_file(held, folder / shard)
        named(INDEX, json.dumps({"weight_map": {n: to for n in held if n != drop}}))(folder)

    return change


def link_to_nothing(name: str) -> Change:
    return lambda folder: [(folder / name).unlink(missing_ok=True), (folder / name).symlink_to("../blobs/4f2a")]


def of_the_base_model(folder: Path) -> None:
    """transformers adds the prefix, and opens it."""
    rewrite_config(folder, tie_word_embeddings=True)
    spoil(folder, lambda t: [t.pop("lm_head.weight"), t.update({n.removeprefix("model."): t.pop(n) for n in list(t)})])


def tied_to_others(folder: Path) -> None:
    rewrite_config(folder, tie_word_embeddings=True)
    spoil(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
OTHER_DTYPE = EXPERT.format(2, "up")
WIDE = ("one expert transposed", "all experts transposed")
FOLDERS: dict[str, tuple[Change, str]] = {
    "one role of an expert missing": (without(EXPERT.format(3, "up")), "missing: 3;"),
    "an expert missing": (without(*(EXPERT.format(1, r) for r in ROLES)), "missing: 1;"),
    "a role missing": (without(*(EXPERT.format(e, "up") for e in range(4))), "the checkpoint has no mlp.exp"),
    "one expert too many": (with_more(gate=4, up=4, down=4), "too many: 4"),
    "an expert of another number": (tensors(renumbered), "missing: 3; too many: 7"),
    "one expert transposed": (turned(EXPERT.format(2, "down")), "experts.2.down_proj.weight is [12, 16]"),
    "all experts transposed": (turned(), "(transposed?)"),
    "an expert of another dtype": (
        tensors(lambda t: t.update({OTHER_DTYPE: t[OTHER_DTYPE].double()})),
        "different dtypes: torch.float32, torch.float64",
    ),
    "in two layouts at once": (zeros("1.mlp.experts.down_proj", 4, 16, 16), "in the model; one must go"),
    "a weight missing": (without("model.norm.weight"), "lacks 1 weights of Qwen3MoeForCausalLM"),
    "a layer that is not the model's": (zeros("2.mlp.gate.weight", 4, 16), "no place in Qwen3Moe"),
    "a router of more experts": (zeros("0.mlp.gate.weight", 5, 16), "is [5, 16], by its"),
    "a configuration of more experts": (config(num_local_experts=8), "says 8 experts, the checkpoint has 4"),
    "a configuration of fewer": (config(num_local_experts=3), "too many: 3"),
    "tied weights that differ": (tied_to_others, "lm_head.weight and model.embed_tokens.weight are one"),
    "cut off": (lambda f: (f / SINGLE).write_bytes((f / SINGLE).read_bytes()[:-100]), "not a whole safetensors file"),
    "a file of several, no index": (renamed(ONE), f"without {INDEX}: not written to its end"),
    "an index, no file": (indexed(ONE), "is in the index, but not in the folder"),
    "an index that leads outside": (indexed("../other.safetensors"), "in the index, but not in the folder"),
    "a file that the index does not name": (indexed(ONE, ONE, TWO), "is in the folder, but not in the index"),
    "an index of other tensors": (
        indexed(ONE, ONE, drop="lm_head.weight"), "1 tensors are not where it says, among them lm_head.weight",
    ),
    "one file and an index": (named(INDEX), "which of them is"),
    "a link to nothing": (link_to_nothing(SINGLE), f"{SINGLE}: not a whole safetensors file (No such file"),
    "an index that is a link to nothing": (
        lambda f: [(f / SINGLE).unlink(), link_to_nothing(INDEX)(f)], "index.json: cannot be read as an index",
    ),
    "a base model under another class": (of_the_base_model, "there and back. If it is of a base"),
    "an adapter": (
        renamed("adapter_model.safetensors", "training_args.bin"),
        "step-00000000 folder, only adapter_model.safetensors, training_args.bin",
    ),
    "an adapter beside the weights": (named("adapter_config.json"), "adapter_config.json lies beside the weights, and"),
    "no configuration": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "configuration of nothing known": (config(model_type="qwen9_moe"), "qwen9_moe"),
    "a class that is not there": (config(architectures=["Qwen9ForCausalLM"]), "no Qwen9For"),
    "pickled weights": (renamed("pytorch_model.bin"), "only pytorch_model.bin; open it with transformers"),
    "nothing": (lambda f: (f / SINGLE).unlink(), "nothing to convert: no model.safetensors"),
    "a record of nothing known": (named("convert.json"), "not the record of a conversion"),
    "a record of before": (
        named("convert.json", '{"format": "trimtab.convert", "version": 1}'),
        "trimtab.convert of version 1, this trimtab reads trimtab.convert of version 2",
    ),
    "a checkpoint as well": (lambda f: (f / "step-00000001.unfinished").mkdir(), "name one of them"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDERS)
def test_spoiled_folders(case: str, saved: Path, tmp_path: Path) -> None:
    change, words = FOLDERS[case]
    shutil.copytree(saved / ("wide" if case in WIDE else "square"), tmp_path / "hf")
    change(tmp_path / "hf")
    refused(tmp_path / "hf", words)


EXPERTS = "model.model.layers.0.mlp.experts.gate_up_proj"
CHECKPOINTS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "an expert missing": (lambda t: t.update({EXPERTS: t[EXPERTS][:3]}), "is [3, 32, 16], by its configuration [4, 32"),
    "transposed": (lambda t: t.update({EXPERTS: t[EXPERTS].transpose(1, 2)}), "(transposed?)"),
    "a tensor missing": (lambda t: t.pop(EXPERTS), "lacks 1 weights of Qwen3MoeForCausalLM, among them model.layers.0"),
    "a tensor too many": (lambda t: t.update({"model.extra": torch.zeros(2)}), "no place in Qwen3MoeForCausalLM"),
    "no model": (lambda t: [t.update({k.replace("model.", "optim.", 1): t.pop(k)}) for k in list(t)], "no tensor of a"),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_spoiled_checkpoints(case: str, saved: Path, tmp_path: Path) -> None:
    """Whole, and nothing in their index about experts."""
    step, (change, words) = saved / "run" / "step-00000004", CHECKPOINTS[case]
    held = {key: tensor for key, tensor in read_tensors(step).items() if key.startswith("model.")}
    change(held)
    files = {"config.json": (step / "config.json").read_text()}
    write_tensors(tmp_path / "run", held, step=4, experts={}, files=files)
    refused(tmp_path / "run", words, to="safetensors")


def test_checkpoints_that_are_not_whole(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "run", tmp_path / "run")
    step = tmp_path / "run" / "step-00000004"
    data, metadata = next(step.glob("*.distcp")), step / ".metadata"
    for file, spoiled, words in (
        (data, data.read_bytes()[:-1], "not whole"),
        (metadata, bytes(metadata.stat().st_size), f"{metadata}: damaged, cannot be read"),
    ):
        whole = file.read_bytes()
        file.write_bytes(spoiled)
        refused(tmp_path / "run", words, to="safetensors")
        file.write_bytes(whole)
    unfinished = step.rename(step.with_name("step-00000004.unfinished"))
    for src in (tmp_path / "run", unfinished):
        refused(src, "not written to the end", to="safetensors")


def test_weights_of_a_checkpoint_that_should_be_one(tmp_path: Path) -> None:
    model = build("qwen3_moe", tie_word_embeddings=True)
    files = {"config.json": model.config.to_json_string(use_diff=False)}
    held = {f"model.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    held["model.lm_head.weight"] += 1
    write_tensors(tmp_path / "run", held, step=1, experts={}, files=files)
    refused(tmp_path / "run", "lm_head.weight and model.embed_tokens.weight are one weight", to="safetensors")


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_transposed_where_both_fit_is_seen_by_the_record(to: str, saved: Path, tmp_path: Path) -> None:
    name = EXPERT.format(2, "down")
    if to == "dcp":
        convert(saved / "run", tmp_path / "src", to="safetensors")
        turned(name)(tmp_path / "src")
        refused(tmp_path / "src", f"1 tensors are not what was written there, among them {name}")
        return
    folder = convert(saved / "square", tmp_path / "made", to="dcp").folder
    held = read_tensors(folder)
    held["model.model.layers.1.mlp.experts.down_proj"].transpose_(1, 2)
    files = {name: (folder / name).read_text() for name in ("config.json", "convert.json")}
    written = write_tensors(tmp_path / "src", held, step=0, experts={}, files=files)
    refused(written.parent, "among them model.layers.1.mlp.experts.down_proj", to=to)


def test_transposed_where_transformers_would_guess(tmp_path: Path) -> None:
    """Qwen3-VL-MoE's checkpoints come in two layouts that transformers tells apart by shape: not where 2F = D."""
    text = {
        "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_experts": 4,
        "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2, "intermediate_size": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
        "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    }  # fmt: skip
    for hidden in (12, 8):
        made = transformers.Qwen3VLMoeConfig(text_config=text | {"moe_intermediate_size": hidden}, vision_config=vision)
        transformers.Qwen3VLMoeForConditionalGeneration(made).save_pretrained(tmp_path / str(hidden))
    assert convert(tmp_path / "12", tmp_path / "fine", to="dcp").tensors > 0
    refused(
        tmp_path / "8", "experts.gate_up_proj is [4, 16, 16]: transformers tells its two layouts apart by the shape"
    )


@pytest.mark.parametrize(
    ("src", "words", "options"),
    [
        ("square", "holds safetensors already", {"to": "safetensors"}),
        ("run", "holds dcp already", {"to": "dcp"}),
        ("square", "not one of safetensors, dcp", {"to": "gguf"}),
        ("square", "not one of transformers, qwen3_moe", {"layout": "megatron"}),
        ("square", "is this a deepseek_v3 model?", {"layout": "deepseek_v3"}),
        ("nowhere", "no such folder", {"kind": InputError}),
        ("square/config.json", "a file, not a folder", {"kind": InputError}),
    ],
)
def test_arguments(src: str, words: str, options: dict[str, Any], saved: Path) -> None:
    refused(saved / src, words, **{"kind": ConfigError} | options)


def test_targets(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "killed" / "step-00000000.unfinished").mkdir(parents=True)
    (tmp_path / "out.unfinished").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name, to, words in (
        ("full", "dcp", "not empty"),
        ("full/file", "dcp", "a file"),
        ("killed", "dcp", r"not empty, holds step-00000000\.unfinished"),
        ("out", "safetensors", "left of an earlier run"),
        ("here", "safetensors", "the current folder"),
        ("full/file/x", "safetensors", r"cannot be made \(Not a directory\)$"),
    ):
        with pytest.raises(ConfigError, match=words):
            convert(saved / ("square" if to == "dcp" else "run"), tmp_path / name, to=to)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["file"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    done = convert(saved / "run", tmp_path / "link", to="safetensors")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "link" / "config.json").samefile(done.folder / "config.json")


def test_quantised(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "square", tmp_path / "hf")
    rewrite_config(tmp_path / "hf", quantization_config={"quant_method": "fp8"})
    refused(tmp_path / "hf", "quantized", ConfigError)


def test_a_disk_that_lies(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof is about the bytes on the disk, not about those that were meant."""
    write = module.write_safetensors

    def write_and_flip(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        content = bytearray((args[1] / SINGLE).read_bytes())
        content[-1] ^= 1
        (args[1] / SINGLE).write_bytes(content)

    monkeypatch.setattr(module, "write_safetensors", write_and_flip)
    shutil.copytree(saved / "run", tmp_path / "run")
    refused(tmp_path / "run", "does not come back as it was", to="safetensors")


@pytest.mark.parametrize(
    ("to", "writer", "error"),
    [
        (
            "dcp",
            "checkpoint.tensors.dcp_save",
            CheckpointException("", {0: (RuntimeError("pos 7 vs 5"), StackSummary())}),
        ),
        ("safetensors", "convert.files.bits", OSError("pos 7 vs 5")),
    ],
)
def test_a_disk_without_room_is_named(
    to: str, writer: str, error: BaseException, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"trimtab.{writer}", Mock(side_effect=error))
    monkeypatch.setattr(errors, "LEAST_FREE", 1 << 62)
    src = shutil.copytree(saved / ("square" if to == "dcp" else "run"), tmp_path / "src")
    for words in ("pos 7 vs 5; ", " MB are free on the disk of "):
        refused(src, words, to=to)
