"""`trimtab convert --merge`: the bytes of peft's own merge, for every family; and what has no place is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.convert_case import assert_same, tensors_of
from helpers.families import build_model, family_names
from helpers.peft_case import fill, lora
from trimtab.checkpoint import save
from trimtab.cli.main import main
from trimtab.convert.merge import Merged, merge, read_adapter
from trimtab.errors import ConfigError, InputError

pytestmark = pytest.mark.usefixtures("one_thread")


def saved(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The family's model in "base", an adapter of it in "adapter", peft's own merge of them in "truth"."""
    model = build_model(name, dtype=dtype)
    model.save_pretrained(folder / "base")
    made = get_peft_model(model, lora(model, **options))  # adapters are float32, whatever the model is
    fill(made)
    made.save_pretrained(folder / "adapter")
    merged = made.merge_and_unload()
    merged.save_pretrained(folder / "truth")
    return merged


def same_as_peft(folder: Path, done: Merged) -> None:
    assert_same(tensors_of(folder / "truth"), tensors_of(done.written.folder))


@pytest.mark.parametrize("name", family_names())
def test_every_family_has_the_bytes_of_pefts_own_merge(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    done = merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    same_as_peft(tmp_path, done)
    assert done.experts
    assert all(some == every for some, every in done.experts.values())


def test_attention_patterns_scaling_and_bfloat16(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "target_modules": ["q_proj", "o_proj"], "use_rslora": True, "rank_pattern": {"down_proj": 5, "q_proj": 2},
        "alpha_pattern": {"gate_up_proj": 1},
    }  # fmt: skip
    saved("qwen3_moe", tmp_path, torch.bfloat16, **options)
    same_as_peft(tmp_path, merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"))


def test_into_a_checkpoint_of_ours(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    save(tmp_path / "run", build_model("qwen3_moe"), step=1)
    same_as_peft(tmp_path, merge(tmp_path / "run", tmp_path / "adapter", tmp_path / "merged"))


def test_untrained_experts_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved("qwen3_moe", tmp_path)

    def forget(tensors: dict[str, Tensor]) -> None:
        name = next(n for n in tensors if n.endswith("experts.lora_B.weight"))
        tensors[name].view(tensors[name].shape[0], -1, 8)[..., 3] = 0

    spoil(tmp_path, forget)
    code = main(["convert", *map(str, (tmp_path / "base", tmp_path / "out")), "--to", "safetensors", "--merge",
                 str(tmp_path / "adapter")])  # fmt: skip
    said = capsys.readouterr().out
    assert code == 0
    assert "1 layers of down_proj: 7 of 8 experts changed" in said
    assert "2 layers of gate_up_proj: 8 of 8 experts changed" in said


def spoil(folder: Path, change: Callable[[dict[str, Tensor]], None], **config: Any) -> None:
    file, settings = folder / "adapter" / "adapter_model.safetensors", folder / "adapter" / "adapter_config.json"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    settings.write_text(json.dumps(json.loads(settings.read_text()) | config))


def _drop_an_expert(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if name.endswith("0.mlp.experts.lora_A.weight"):
            tensors[name] = tensor[:-3]


def _rename(tensors: dict[str, Tensor]) -> None:
    name = next(iter(tensors))
    tensors[name.replace("experts", "expertz")] = tensors.pop(name)


def _drop_a_layer(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if ".layers.1." in name]:
        del tensors[name]


def _of_the_head(tensors: dict[str, Tensor]) -> None:
    tensors["base_model.model.lm_head.lora_A.weight"] = torch.ones(3, 32)


def _of_both(tensors: dict[str, Tensor]) -> None:
    _of_the_head(tensors)
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.ones(3, 64)


BEGUN = "changes the base model before training.*path_initial_model_for_weight_conversion=START"
REFUSED: list[tuple[Any, str, dict[str, Any]]] = [
    (_drop_an_expert, r"down_proj is \[8, 32, 16\], and with r = 3 its A is \[21, 16\]", {}),
    (_rename, r"1 tensors have no place in Qwen3MoeForCausalLM, first .*expertz", {}),
    (_drop_a_layer, "2 weights that it names have no adapter in it, first model.layers.1.mlp.experts.down_proj", {}),
    (_of_the_head, "it changes lm_head: adapters of embeddings", {}),
    (_of_both, "it changes model.embed_tokens, lm_head: adapters of embeddings.*merge_and_unload", {}),
    (dict, "use_dora=True: only plain LoRA", {"use_dora": True}),
    *(
        (dict, f"init_lora_weights='{kind}' {BEGUN}", {"init_lora_weights": kind})
        for kind in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "one of tomorrow")
    ),
]


@pytest.mark.parametrize(("change", "says", "config"), REFUSED)
def test_what_is_not_whole_or_not_added_to_the_base_is_refused(
    change: Any, says: str, config: dict[str, Any], tmp_path: Path
) -> None:
    saved("qwen3_moe", tmp_path)
    spoil(tmp_path, change, **config)
    with pytest.raises((ConfigError, InputError), match=says):
        merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("kind", [True, "gaussian", "orthogonal", "mica", "pissa", "olora"])
def test_adapters_of_any_beginning_are_merged_as_they_were_trained(kind: Any, tmp_path: Path) -> None:
    """Those that change the base by peft's own way out, as what was added to it."""
    base, folder = build_model("qwen3_moe"), tmp_path / "adapter"
    base.save_pretrained(tmp_path / "base")
    made = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=kind))
    made.save_pretrained(tmp_path / "start")
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter += 0.1 * torch.randn(parameter.shape) * ("lora_" in name)
    changes = (
        {"path_initial_model_for_weight_conversion": str(tmp_path / "start")} if kind in ("pissa", "olora") else {}
    )
    if changes:
        made.save_pretrained(folder)
        with pytest.raises(ConfigError, match=BEGUN):
            merge(tmp_path / "base", folder, tmp_path / "merged")
    made.save_pretrained(folder, **changes)
    made.merge_and_unload().save_pretrained(tmp_path / "truth")
    done = tensors_of(merge(tmp_path / "base", folder, tmp_path / "merged").written.folder)
    for name, true in tensors_of(tmp_path / "truth").items():
        torch.testing.assert_close(done[name], true, rtol=0, atol=1e-5 if changes else 0)


def test_files_of_peft_before_0_19(tmp_path: Path) -> None:
    """It took the second dimension for the input: A is [E * r, out] and B [in, r * E]; where the weight is square its
    version tells."""
    for hidden, known in ((16, True), (32, True), (32, False)):  # down_proj [8, 32, hidden]
        folder = tmp_path / f"{hidden}{known}"
        folder.mkdir()
        model = build_model("qwen3_moe")
        experts = model.model.layers[0].mlp.experts
        experts.down_proj = torch.nn.Parameter(torch.zeros(8, 32, hidden))
        del model.model.layers[1]
        a, b = torch.randn(8 * 3, 32), torch.randn(hidden, 3 * 8)
        at = "base_model.model.model.layers.0.mlp.experts"
        save_file({f"{at}.lora_A.weight": a, f"{at}.lora_B.weight": b}, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_parameters": ["experts.down_proj"]}
        config |= {"peft_version": "0.18.1"} if known else {}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        if not known:
            with pytest.raises(InputError, match="both orientations fit"):
                read_adapter(folder, model)
            continue
        (adapter,) = read_adapter(folder, model).values()
        for expert in range(8):
            delta = 2 * (b.view(hidden, 3, 8)[..., expert] @ a[3 * expert : 3 * expert + 3]).mT
            torch.testing.assert_close(adapter.delta(slice(None))[expert], delta)
