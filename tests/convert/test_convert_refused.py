"""Spoiled sources: each is refused in one sentence that says what is wrong, and nothing is left where it was to go."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from helpers.convert_case import Tensors, build, rewrite_config, spoil
from trimtab import errors
from trimtab.checkpoint import read_tensors, save, write_tensors
from trimtab.convert.convert import convert
from trimtab.errors import ConfigError, InputError, TrimtabError

pytestmark = pytest.mark.usefixtures("one_thread")
EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"
ROLES = ("gate", "up", "down")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that transformers and trimtab.checkpoint wrote: `square` has D = F, `wide` has not."""
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


def without(*names: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


def with_more(**roles: int) -> Callable[[Tensors], None]:
    """An expert of a number that there is not, for each role."""

    def change(tensors: Tensors) -> None:
        for role, number in roles.items():
            tensors[EXPERT.format(number, role)] = tensors[EXPERT.format(0, role)].clone()

    return change


def turned(*names: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in names or [n for n in tensors if "experts" in n]:
            tensors[name] = tensors[name].t()

    return change


def renumbered(tensors: Tensors) -> None:
    """As many experts as there should be, but one of another number."""
    for role in ROLES:
        tensors[EXPERT.format(7, role)] = tensors.pop(EXPERT.format(3, role))


def in_another_dtype(tensors: Tensors) -> None:
    name = EXPERT.format(2, "up")
    tensors[name] = tensors[name].double()


def merged_as_well(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.experts.down_proj"] = torch.zeros(4, 16, 16)


Change = Callable[[Tensors], None]
MUTILATED: dict[str, tuple[str, Change, str]] = {
    "one role of an expert missing": ("square", without(EXPERT.format(3, "up")), "missing: 3;"),
    "an expert missing": ("square", without(*(EXPERT.format(1, r) for r in ROLES)), "missing: 1;"),
    "a role missing": ("square", without(*(EXPERT.format(e, "up") for e in range(4))), "the checkpoint has no mlp.exp"),
    "one expert too many": ("square", with_more(gate=4, up=4, down=4), "too many: 4"),
    "an expert of another number": ("square", renumbered, "missing: 3; too many: 7"),
    "one expert transposed": ("wide", turned(EXPERT.format(2, "down")), "experts.2.down_proj.weight is [12, 16]"),
    "all experts transposed": ("wide", turned(), "(transposed?)"),
    "an expert of another dtype": ("square", in_another_dtype, "different dtypes: torch.float32, torch.float64"),
    "in two layouts at once": ("square", merged_as_well, "in the model; one must go"),
    "a weight missing": ("square", without("model.norm.weight"), "lacks 1 weights of Qwen3MoeForCausalLM"),
    "a layer that is not the model's": (
        "square", lambda t: t.update({"model.layers.2.mlp.gate.weight": torch.zeros(4, 16)}), "no place in Qwen3Moe",
    ),
    "a router of more experts": (
        "square", lambda t: t.update({"model.layers.0.mlp.gate.weight": torch.zeros(5, 16)}), "is [5, 16], by its",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MUTILATED)
def test_mutilated(case: str, saved: Path, tmp_path: Path) -> None:
    folder, change, words = MUTILATED[case]
    shutil.copytree(saved / folder, tmp_path / "hf")
    spoil(tmp_path / "hf", change)
    refused(tmp_path / "hf", words)


def test_a_configuration_of_other_experts(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "square", tmp_path / "hf")
    rewrite_config(tmp_path / "hf", num_local_experts=8)
    refused(tmp_path / "hf", "says 8 experts, the checkpoint has 4")
    rewrite_config(tmp_path / "hf", num_local_experts=3)
    refused(tmp_path / "hf", "too many: 3")


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_transposed_where_both_fit_is_seen_by_the_record(to: str, saved: Path, tmp_path: Path) -> None:
    name = EXPERT.format(2, "down")
    if to == "dcp":
        convert(saved / "run", tmp_path / "src", to="safetensors")
        spoil(tmp_path / "src", turned(name))
        refused(tmp_path / "src", f"1 tensors are not what was written there, among them {name}")
        return
    folder = convert(saved / "square", tmp_path / "made", to="dcp").folder
    tensors = read_tensors(folder)
    tensors["model.model.layers.1.mlp.experts.down_proj"].transpose_(1, 2)
    files = {name: (folder / name).read_text() for name in ("config.json", "convert.json")}
    written = write_tensors(tmp_path / "src", tensors, step=0, experts={}, files=files)
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
        config = transformers.Qwen3VLMoeConfig(
            text_config=text | {"moe_intermediate_size": hidden}, vision_config=vision
        )
        transformers.Qwen3VLMoeForConditionalGeneration(config).save_pretrained(tmp_path / str(hidden))
    assert convert(tmp_path / "12", tmp_path / "fine", to="dcp").tensors > 0
    refused(
        tmp_path / "8", "experts.gate_up_proj is [4, 16, 16]: transformers tells its two layouts apart by the shape"
    )


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def only_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")


def only_an_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def shard_beside_the_index(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for i in (1, 2):
        save_file(tensors, folder / f"model-0000{i}-of-00002.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def index_of_another(folder: Path) -> None:
    shard_beside_the_index(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    path = folder / "model.safetensors.index.json"
    index: dict[str, Any] = json.loads(path.read_text())
    del index["weight_map"]["lm_head.weight"]
    path.write_text(json.dumps(index))


def link_to_nothing(folder: Path, name: str = "model.safetensors") -> None:
    (folder / name).unlink()
    (folder / name).symlink_to("../blobs/4f2a")


def index_that_is_a_link_to_nothing(folder: Path) -> None:
    only_an_index(folder)
    link_to_nothing(folder, "model.safetensors.index.json")


def of_the_base_model(folder: Path) -> None:
    """transformers adds the prefix, and opens it."""
    rewrite_config(folder, tie_word_embeddings=True)
    spoil(folder, lambda t: [t.pop("lm_head.weight"), t.update({n.removeprefix("model."): t.pop(n) for n in list(t)})])


def only_an_adapter(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "training_args.bin").touch()


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (cut_off, "not a whole safetensors file"),
    "a file of several, no index": (only_a_shard, "without model.safetensors.index.json: not written to its end"),
    "an index, no file": (only_an_index, "is in the index, but not in the folder"),
    "a file that the index does not name": (shard_beside_the_index, "is in the folder, but not in the index"),
    "an index of other tensors": (index_of_another, "1 tensors are not where it says, among them lm_head.weight"),
    "one file and an index": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "which of them is"),
    "a link to nothing": (link_to_nothing, "model.safetensors: not a whole safetensors file (No such file"),
    "an index that is a link to nothing": (index_that_is_a_link_to_nothing, "index.json: cannot be read as an index"),
    "a base model under another class": (of_the_base_model, "there and back. If it is of a base"),
    "an adapter": (only_an_adapter, "step-00000000 folder, only adapter_model.safetensors, training_args.bin"),
    "no configuration": (no_config, "no config.json"),
    "configuration of nothing known": (lambda f: rewrite_config(f, model_type="qwen9_moe"), "qwen9_moe"),
    "a class that is not there": (lambda f: rewrite_config(f, architectures=["Qwen9ForCausalLM"]), "no Qwen9For"),
    "pickled weights": (pickled, "only pytorch_model.bin; open it with transformers"),
    "nothing": (lambda f: (f / "model.safetensors").unlink(), "nothing to convert: no model.safetensors"),
    "a record of nothing known": (lambda f: (f / "convert.json").write_text("{}"), "not the record of a conversion"),
    "a record of before": (
        lambda f: (f / "convert.json").write_text('{"format": "trimtab.convert", "version": 1}'),
        "trimtab.convert of version 1, this trimtab reads trimtab.convert of version 2",
    ),
    "a checkpoint as well": (lambda f: (f / "step-00000001.unfinished").mkdir(), "name one of them"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders(case: str, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "square", tmp_path / "hf")
    change, words = BROKEN[case]
    change(tmp_path / "hf")
    refused(tmp_path / "hf", words)


def checkpoint_of(tmp_path: Path, saved: Path, change: Callable[[Tensors], None]) -> Path:
    """The run's checkpoint with other tensors, whole, and nothing in its index about experts."""
    step = saved / "run" / "step-00000004"
    tensors = {key: tensor for key, tensor in read_tensors(step).items() if key.startswith("model.")}
    change(tensors)
    files = {"config.json": (step / "config.json").read_text()}
    return write_tensors(tmp_path / "run", tensors, step=4, experts={}, files=files).parent


EXPERTS = "model.model.layers.0.mlp.experts.gate_up_proj"
SPOILED: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "an expert missing": (lambda t: t.update({EXPERTS: t[EXPERTS][:3]}), "is [3, 32, 16], by its configuration [4, 32"),
    "transposed": (lambda t: t.update({EXPERTS: t[EXPERTS].transpose(1, 2)}), "(transposed?)"),
    "a tensor missing": (lambda t: t.pop(EXPERTS), "lacks 1 weights of Qwen3MoeForCausalLM, among them model.layers.0"),
    "a tensor too many": (lambda t: t.update({"model.extra": torch.zeros(2)}), "no place in Qwen3MoeForCausalLM"),
    "no model": (lambda t: [t.update({k.replace("model.", "optim.", 1): t.pop(k)}) for k in list(t)], "no tensor of a"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_spoiled_checkpoints(case: str, saved: Path, tmp_path: Path) -> None:
    change, words = SPOILED[case]

    def changed(tensors: dict[str, Tensor]) -> None:
        change(tensors)

    refused(checkpoint_of(tmp_path, saved, changed), words, to="safetensors")


def test_checkpoints_that_are_not_whole(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "run", tmp_path / "run")
    step = tmp_path / "run" / "step-00000004"
    data = next(step.glob("*.distcp"))
    whole = data.read_bytes()
    data.write_bytes(whole[:-1])
    refused(tmp_path / "run", "not whole", to="safetensors")
    data.write_bytes(whole)
    told = step / ".metadata"
    kept = told.read_bytes()
    told.write_bytes(bytes(len(kept)))
    refused(tmp_path / "run", f"{told}: damaged, cannot be read", to="safetensors")
    told.write_bytes(kept)
    step.rename(step.with_name("step-00000004.unfinished"))
    refused(tmp_path / "run", "not written to the end", to="safetensors")
    refused(tmp_path / "run" / "step-00000004.unfinished", "not written to the end", to="safetensors")


def test_weights_that_should_be_one(tmp_path: Path) -> None:
    model = build("qwen3_moe", tie_word_embeddings=True)
    files = {"config.json": model.config.to_json_string(use_diff=False)}
    tensors = {f"model.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    tensors["model.lm_head.weight"] += 1
    write_tensors(tmp_path / "run", tensors, step=1, experts={}, files=files)
    refused(tmp_path / "run", "lm_head.weight and model.embed_tokens.weight are one weight", to="safetensors")
    model.save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    save_file({**load_file(file), "lm_head.weight": torch.ones(model.lm_head.weight.shape)}, file, {"format": "pt"})
    refused(tmp_path / "hf", "lm_head.weight and model.embed_tokens.weight are one weight", to="dcp")


def test_arguments(saved: Path, tmp_path: Path) -> None:
    hf = saved / "square"
    refused(hf, "holds safetensors already", ConfigError, to="safetensors")
    refused(saved / "run", "holds dcp already", ConfigError, to="dcp")
    refused(hf, "not one of safetensors, dcp", ConfigError, to="gguf")
    refused(hf, "not one of transformers, qwen3_moe", ConfigError, layout="megatron")
    refused(hf, "is this a deepseek_v3 model?", ConfigError, layout="deepseek_v3")
    refused(saved / "nowhere", "no such folder")
    refused(hf / "config.json", "a file, not a folder")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for taken in (tmp_path / "full", tmp_path / "full" / "file"):
        with pytest.raises(ConfigError, match=r"not empty|a file"):
            convert(hf, taken, to="dcp")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["file"]
    (tmp_path / "killed" / "step-00000000.unfinished").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"not empty, holds step-00000000\.unfinished"):
        convert(hf, tmp_path / "killed", to="dcp")
    (tmp_path / "out.unfinished").mkdir()
    with pytest.raises(ConfigError, match="left of an earlier run"):
        convert(saved / "run", tmp_path / "out", to="safetensors")
    (tmp_path / "empty").mkdir()
    assert convert(saved / "run", tmp_path / "empty", to="safetensors").tensors


def test_a_link_to_an_empty_folder_and_the_current_folder(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    done = convert(saved / "run", tmp_path / "link", to="safetensors")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "link" / "config.json").samefile(done.folder / "config.json")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConfigError, match="the current folder"):
        convert(saved / "run", ".", to="safetensors")
    with pytest.raises(ConfigError, match=r"cannot be made \(Not a directory\)$"):
        convert(saved / "run", tmp_path / "real" / "config.json" / "x", to="safetensors")


def test_quantised(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "square", tmp_path / "hf")
    rewrite_config(tmp_path / "hf", quantization_config={"quant_method": "fp8"})
    refused(tmp_path / "hf", "quantized", ConfigError)


def test_a_disk_that_lies(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is proved is what lies on the disk, not what was meant to."""
    from trimtab.convert import convert as module

    write = module.write_safetensors

    def write_and_flip(*args: Any, **kwargs: Any) -> list[str]:
        files = write(*args, **kwargs)
        file = args[1] / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        return files

    monkeypatch.setattr(module, "write_safetensors", write_and_flip)
    shutil.copytree(saved / "run", tmp_path / "run")
    refused(tmp_path / "run", "does not come back as it was", to="safetensors")


@pytest.mark.parametrize(
    ("to", "writer", "error"),
    [
        (
            "dcp",
            "trimtab.convert.dcp_files.save",
            CheckpointException("", {0: (RuntimeError("pos 7 vs 5"), StackSummary())}),
        ),
        ("safetensors", "trimtab.convert.safetensors_files.save_file", SafetensorError("pos 7 vs 5")),
    ],
)
def test_a_disk_without_room_is_named(
    to: str, writer: str, error: BaseException, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(writer, fails)
    monkeypatch.setattr(errors, "LEAST_FREE", 1 << 62)
    src = shutil.copytree(saved / ("square" if to == "dcp" else "run"), tmp_path / "src")
    refused(src, "pos 7 vs 5; ", to=to)
    refused(src, " MB are free on the disk of ", to=to)
