"""Experts as codes: they compute what the decoded weights compute, and are read, saved, merged into, on ranks too."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import FineGrainedFP8Config, Mxfp4Config
from transformers.distributed import DistributedConfig

from helpers import family_config
from helpers.coded_checkpoints import loss_and_gradients, same_adapters_on, same_gradients, save_official, tiny
from helpers.comparing import full_value
from helpers.families import build_model, model_class, save_model
from helpers.model_ranks import begin
from helpers.peft_case import adapt, fill, lora
from helpers.ranks import run_ranks
from trimtab.checkpoint.state import is_transformers_experts
from trimtab.convert.export import save_pretrained
from trimtab.errors import ConfigError, InputError
from trimtab.experts.module import ExpertMLP
from trimtab.integrations.transformers import QuantizedExpertsConfig, dequantize_experts, quantize_experts, quantized
from trimtab.integrations.transformers.quantized import MARK
from trimtab.integrations.transformers.quantized.prequantized import prequantized_format
from trimtab.kernels.choose import get_backend

pytestmark = pytest.mark.usefixtures("registered", "one_thread")
FORMAT = {"fp8": "fp8", "ue8m0": "fp8", "fp4": "mxfp4", "mxfp4": "mxfp4"}
"""Of each kind of `save_official`."""
WEIGHTS = ("experts.gate_up_proj", "experts.down_proj")
READ_IN_TURN = ("qwen3_moe", "gpt_oss", "nemotron_h", "qwen3_vl_moe", "ernie4_5_vl_moe", "aria")
"""As merged experts, stacked and transposed, without a gate, turned, two stacks of a list, transposed."""


def load(folder: Path | str, experts: str = "trimtab", **more: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation=experts, **more)


def whole(folder: Path, kind: str, **more: Any) -> Any:
    """As transformers decodes it."""
    config = Mxfp4Config(dequantize=True) if kind == "mxfp4" else FineGrainedFP8Config(dequantize=True)
    return load(folder, quantization_config=config, **more)


def marks(model: Any) -> set[Any]:
    return {getattr(module, MARK, None) for module in model.modules() if is_transformers_experts(module)}


def same(some: Any, other: Any) -> None:
    a, b = some.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(value, b[key]) and value.dtype is b[key].dtype for key, value in a.items())


def of_others(model: Any) -> Any:
    """Loss and gradients, those of experts' weights left out."""
    loss, gradients = loss_and_gradients(model)
    return loss, {key: grad for key, grad in gradients.items() if not key.endswith(WEIGHTS)}


def with_decoded(model: nn.Module) -> nn.Module:
    """The same model with the weights that its codes stand for."""
    return dequantize_experts(copy.deepcopy(model))


@pytest.mark.parametrize("name", ["nf4", "int8", "packed"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_model_of_codes_is_that_of_what_they_decode_to(family: str, name: str) -> None:
    """With peft's adapters on them, too."""
    model = quantize_experts(tiny(family), name)
    assert sum("experts.gate_up_proj_scales" in key for key in model.state_dict()) == 2
    same_adapters_on(copy.deepcopy(model), with_decoded(model))
    same_gradients(loss_and_gradients(model), of_others(with_decoded(model)))


@pytest.mark.parametrize("name", ["nf4", "packed"])
@pytest.mark.parametrize("other", ["eager", "grouped_mm", "batched_mm"])
def test_another_implementation_that_is_set_behind_codes_is_refused_by_name(name: str, other: str) -> None:
    model = quantize_experts(tiny("qwen3_moe"), name)
    before = loss_and_gradients(model)
    copied = copy.deepcopy(model)
    for each in (model, copied):
        each.set_experts_implementation(other)
        with pytest.raises(ConfigError, match=rf"experts as codes are run by trimtab: .* before \({name}\)"):
            loss_and_gradients(each)
    copied.set_experts_implementation("trimtab")
    same_gradients(loss_and_gradients(copied), before)
    torch.testing.assert_close(loss_and_gradients(dequantize_experts(model))[0], before[0])


CASTS: dict[str, Callable[[Any], object]] = {
    "to": lambda model: model.to(torch.bfloat16), "keyword": lambda model: model.to(dtype=torch.float64),
    "bfloat16": lambda model: model.bfloat16(), "inner": lambda model: model.model.double(),
    "experts": lambda model: [module.half() for module in model.modules() if is_transformers_experts(module)],
}  # fmt: skip


@pytest.mark.parametrize("name", ["nf4", "int8", "packed"])
@pytest.mark.parametrize("cast", CASTS)
def test_scales_that_a_cast_has_rounded_are_used_for_nothing(cast: str, name: str, tmp_path: Path) -> None:
    model = quantize_experts(tiny("qwen3_moe"), name)
    CASTS[cast](model)
    for use in (loss_and_gradients, dequantize_experts, lambda model: model.save_pretrained(tmp_path)):
        with pytest.raises(ConfigError, match=rf"(codes|scales) of {name} came in .*place of model\.to\(dtype\)"):
            use(model)


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_codes_compute_in_the_dtype_of_their_weights_whatever_the_rest_is_cast_to(name: str) -> None:
    model = quantize_experts(tiny("qwen3_moe").bfloat16(), name)
    truth = with_decoded(model).to(torch.float32)
    for module in truth.modules():
        if is_transformers_experts(module):
            module.bfloat16()
    same_gradients(loss_and_gradients(model.to(torch.float32)), of_others(truth))
    for refused in (model.half, model.float):
        with pytest.raises(ValueError, match="not supported for quantized model"):
            refused()


@pytest.mark.parametrize("kind", FORMAT)
def test_official_codes_are_kept_run_saved_read_again_and_taken_out(kind: str, tmp_path: Path) -> None:
    folder = save_official(tmp_path / "official", kind)
    kept, truth = load(folder, dtype="float32"), whole(folder, kind, dtype="float32")
    assert marks(kept) == {(FORMAT[kind], torch.float32)}
    assert prequantized_format(transformers.AutoConfig.from_pretrained(folder)) == FORMAT[kind]
    same_gradients(loss_and_gradients(kept), of_others(truth))

    kept.save_pretrained(tmp_path / "saved")
    same(load(tmp_path / "saved", dtype="float32"), kept)
    assert prequantized_format(transformers.AutoConfig.from_pretrained(tmp_path / "saved")) == FORMAT[kind]
    if kind == "mxfp4":  # the rest was never coded: the file is gpt-oss's again
        was, now = load_file(folder / "model.safetensors"), load_file(tmp_path / "saved" / "model.safetensors")
        assert was.keys() == now.keys()
        assert all(torch.equal(t, now[key].to(t.dtype)) for key, t in was.items())
    same(kept.dequantize(), truth)
    kept.save_pretrained(tmp_path / "plain")
    same(load(tmp_path / "plain", dtype="float32"), truth)


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_official_codes_under_adapters_in_part_and_for_other_experts(kind: str, tmp_path: Path) -> None:
    folder = save_official(tmp_path / "all", kind)
    same_adapters_on(load(folder, dtype="float32"), whole(folder, kind, dtype="float32"))
    same(load(folder, "grouped_mm"), whole(folder, kind))
    folder = save_official(tmp_path / "part", kind, plain="model.layers.1.mlp.experts")
    kept, truth = load(folder), whole(folder, kind)
    assert marks(kept) == {(FORMAT[kind], torch.bfloat16), None}
    kept.save_pretrained(tmp_path / "saved")
    same(load(tmp_path / "saved"), kept)
    same(kept.dequantize(), truth)


@pytest.mark.parametrize("name", ["int8", "packed"])
@pytest.mark.parametrize("family", READ_IN_TURN)
def test_read_saved_and_read_again(family: str, name: str, tmp_path: Path) -> None:
    """What is read is what `quantize_experts` makes of the model; its files hold the bits, of packed ones the plain."""
    wide = dict.fromkeys(("intermediate_size", "moe_intermediate_size", "moe_hidden_size", "moe_latent_size"), 32)
    ernie = family_config.FAMILY["ernie4_5_vl_moe"] | {"moe_intermediate_size": [32, 32]}
    own = {key: value | wide for key, value in family_config.FAMILY.items()} | {"ernie4_5_vl_moe": ernie}
    with patch.dict(family_config.SMALL, wide), patch.dict(family_config.FAMILY, own):
        save_model(family, tmp_path / "read", 0)
    options = {"experts_implementation": "trimtab", "dtype": "float32"}
    config = QuantizedExpertsConfig(name)
    read = model_class(family).from_pretrained(tmp_path / "read", quantization_config=config, **options)
    plain = model_class(family).from_pretrained(tmp_path / "read", **options)
    plain.save_pretrained(tmp_path / "plain")
    same(read, quantize_experts(plain, name))
    read.save_pretrained(tmp_path / "codes")
    if name == "int8":
        assert json.loads((tmp_path / "codes" / "config.json").read_text())["quantization_config"]["format"] == "int8"
        same(model_class(family).from_pretrained(tmp_path / "codes", **options), read)
    for file in ("model.safetensors", "config.json") if name == "packed" else ():
        assert (tmp_path / "codes" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes(), file


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "nemotron_h"])  # the last without a gate
def test_packed_is_the_model_that_was_read(family: str, dtype: str, tmp_path: Path) -> None:
    """Packed while it is read or in place: the same panels, tokens and gradients."""
    tiny(family, layers_block_type=["attention", "moe"]).to(getattr(torch, dtype)).save_pretrained(tmp_path / "plain")
    plain = load(tmp_path / "plain", dtype=dtype)
    read = load(tmp_path / "plain", dtype=dtype, quantization_config=QuantizedExpertsConfig("packed"))
    placed = quantize_experts(load(tmp_path / "plain", dtype=dtype), "packed")
    same(read, placed)
    assert marks(read) == {("packed", getattr(torch, dtype))}
    tokens = torch.arange(12).view(2, 6) * 7 % 64
    given: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    found = [model.generate(tokens, attention_mask=torch.ones_like(tokens), **given) for model in (plain, read)]
    assert torch.equal(*found)
    if get_backend("auto", torch.device("cpu")).name == "cpu":  # the same products, in the same order
        (loss, got), (truth, want) = (loss_and_gradients(adapt(copy.deepcopy(model))) for model in (read, plain))
        assert torch.equal(loss, truth)
        assert got.keys() == want.keys()
        assert all(torch.equal(value, want[key]) for key, value in got.items())
    same(dequantize_experts(placed), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_is_saved_as_plain_and_stays_packed_where_that_fails(dtype: torch.dtype, tmp_path: Path) -> None:
    """Parts, shards with their index, a state that is handed in; and single experts that are resumed from."""
    plain = tiny("qwen3_moe").to(dtype)
    packed = quantize_experts(copy.deepcopy(plain), "packed")
    before = copy.deepcopy(packed.state_dict())
    other = {key: 2 * value for key, value in plain.state_dict().items()}
    below, around = copy.deepcopy(plain), copy.deepcopy(plain)
    quantize_experts(below.model, "packed")
    quantize_experts(nn.Sequential(around), "packed")
    saves: list[Callable[[Any, Path], object]] = [
        save_pretrained,
        lambda model, folder: save_pretrained(model.model, folder),
        lambda model, folder: model.model.save_pretrained(folder),
        lambda model, folder: model.save_pretrained(folder, max_shard_size="50KB"),
        lambda model, folder: model.save_pretrained(folder, state_dict=other),
        lambda model, to: model.save_pretrained(to, state_dict={k: 2 * v for k, v in model.state_dict().items()}),
        lambda model, folder: (model if model is plain else with_decoded(model)).save_pretrained(folder),
        lambda model, folder: model.save_pretrained(folder, state_dict=model.state_dict()),
    ]
    for i, save in enumerate(saves):
        folders = [tmp_path / f"{i} of {kind}" for kind in ("plain", "packed", "below", "around")]
        for model, folder in zip((plain, packed, below, around), folders, strict=True):
            save(model, folder)
        wanted, *got = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders)
        assert got == [wanted] * 3
    with patch.object(packed.config, "save_pretrained", side_effect=OSError), pytest.raises(OSError):
        packed.save_pretrained(tmp_path)
    assert all(torch.equal(value, before[key]) for key, value in packed.state_dict().items())
    assert packed.hf_quantizer is not None
    single = load_file(folders[1] / "model.safetensors")
    packed.requires_grad_(True).load_state_dict(single, strict=False)  # which it has
    with patch.object(quantized, "decoded", side_effect=AssertionError("needs no values")):
        packed.load_state_dict({}, strict=False)
    single["model.layers.1.mlp.experts.3.up_proj.weight"][0, 0] += 1
    with pytest.raises(InputError, match="more tensors of single experts would not be loaded"):
        packed.load_state_dict(single, strict=False)


def test_codes_are_neither_saved_nor_loaded_as_weights(tmp_path: Path) -> None:
    """Of a part, of a model around what was quantized, of a part of an official one."""
    whole, around = (tiny("qwen3_moe") for _ in range(2))
    quantize_experts(whole, "nf4")
    quantize_experts(around.model, "int8")
    for model in (whole.model, around, load(save_official(tmp_path / "read", "mxfp4")).model):
        for save in (save_pretrained, type(model).save_pretrained):
            with pytest.raises(ConfigError, match="codes of experts saved as weights: save the model that was quan"):
                save(model, tmp_path / "saved")
    assert not [*tmp_path.glob("saved/*")]
    plain = nn.Sequential(tiny("qwen3_moe"))
    fp8 = plain.state_dict() | {"0.model.layers.0.mlp.experts.gate_up_proj_scale_inv": torch.ones(2, 1, 1)}
    for codes in (fp8, nn.Sequential(around).state_dict()):
        with pytest.raises(ConfigError, match=r"0\.mlp\.experts\.gate_up_proj came as codes"):
            plain.load_state_dict(codes, strict=False)


@pytest.mark.parametrize("name", ["nf4", "int8", "packed"])
def test_experts_that_accelerate_offloads_run_and_are_otherwise_refused(name: str, tmp_path: Path) -> None:
    accelerate, inner = pytest.importorskip("accelerate"), quantize_experts(tiny("qwen3_moe"), name)
    accelerate.cpu_offload(inner, torch.device("cpu"), preload_module_classes=["Qwen3MoeDecoderLayer"])
    tiny("qwen3_moe").save_pretrained(tmp_path)
    parts = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
    where, config = dict.fromkeys(parts, "cpu") | {"model.layers.1": "disk"}, QuantizedExpertsConfig(name)
    plain = load(tmp_path, device_map=where, offload_folder=tmp_path / "0")
    model = load(tmp_path, device_map=where, offload_folder=tmp_path / "1", quantization_config=config)
    for use in (lambda: model.save_pretrained(tmp_path / "2"), lambda: dequantize_experts(model),
                lambda: quantize_experts(plain, name), lambda: dequantize_experts(inner)):  # fmt: skip
        with pytest.raises(ConfigError, match="accelerate has offloaded experts of Qwen3MoeForCausalLM"):
            use()
    assert not (tmp_path / "2").exists()
    both = model, load(tmp_path, quantization_config=config)
    assert torch.equal(*(each(torch.arange(12).view(2, 6)).logits for each in both))


def test_quantized_in_place_saved_and_read_again(tmp_path: Path) -> None:
    model = quantize_experts(tiny("qwen3_moe"), "nf4")
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    same(again, model)
    assert not any(p.requires_grad for name, p in again.named_parameters() if name.endswith(("proj_scales", *WEIGHTS)))
    again.load_state_dict(model.state_dict())
    assert torch.equal(loss_and_gradients(again)[0], loss_and_gradients(model)[0])
    with pytest.raises(ConfigError, match="are codes already"):
        quantize_experts(again)
    with pytest.raises(ConfigError, match="pass experts_implementation='trimtab'"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["int8", "packed"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_merging_is_refused_until_the_weights_are_back(family: str, name: str) -> None:
    peft = pytest.importorskip("peft")
    base = quantize_experts(tiny(family), name)
    model = peft.get_peft_model(base, lora(base, target_modules=["q_proj"]))
    fill(model)
    values = tiny(family) if name == "packed" else dequantize_experts(quantize_experts(tiny(family), name))
    plain = peft.get_peft_model(values, model.peft_config["default"])
    fill(plain)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(ConfigError, match=r"take no adapter in.*dequantize_experts\(model\)"):
            merge()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), "nothing was merged"
    same(dequantize_experts(model).merge_and_unload(), plain.merge_and_unload())


def test_packed_shards_of_different_sizes_are_saved_as_the_whole() -> None:
    """As FSDP cuts seven experts over two ranks."""
    module: Any = next(filter(is_transformers_experts, quantize_experts(tiny("qwen3_moe"), "packed").modules()))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        for name, own in list(module.named_parameters()):
            size = torch.Size((7, *own.shape[1:]))
            cut = DTensor.from_local(own.detach(), mesh, [Shard(0)], run_check=False, shape=size, stride=own.stride())
            setattr(module, name, nn.Parameter(cut, requires_grad=False))
        assert quantized.dequantized(module, "down_proj").shape == (7, 64, 64)
    finally:
        dist.destroy_process_group()


def read_and_save(folder: str, kind: str, given: dict[str, Any]) -> tuple[dict[str, Tensor], set[int], int]:
    """All tensors of a model at ep 2, together, saved and read again; this rank's experts; matrices that it encoded."""
    begin()
    encoded, quantize = [0], quantized.quantize_matrices

    def counting(value: Tensor, name: str, *, transposed: bool = False) -> tuple[Tensor, Tensor]:
        encoded[0] += value.numel() // (value.shape[-1] * value.shape[-2])
        return quantize(value, name, transposed=transposed)

    def over_ranks(folder: str, ep: int, **more: Any) -> Any:
        mesh = DistributedConfig(ep_size=ep, fsdp_size=2, ep_implementation="trimtab")
        return load(folder, dtype="float32", distributed_config=mesh, **more)

    with patch.object(quantized, "quantize_matrices", counting):
        model = over_ranks(folder, 2, **given)
    mine = model.state_dict()
    local = (value.to_local() if hasattr(value, "to_local") else value for value in mine.values())
    experts = {value.shape[0] for value in local if value.dim() == 3}
    together = {key: full_value(value) for key, value in mine.items()}
    with patch.object(quantized, "dequantized", wraps=quantized.dequantized) as decoding:
        model.save_pretrained(f"{folder}-saved", is_main_process=dist.get_rank() == 0)
    assert decoding.call_count == (4 if kind == "packed" else 0), "each of the weights once"
    dist.barrier()
    for ep in (1, 2):
        again = over_ranks(f"{folder}-saved", ep, **(given if kind == "packed" else {})).state_dict()
        assert again.keys() == together.keys()
        for key, value in again.items():
            assert torch.equal(full_value(value), together[key]), (ep, key)
    return together, experts, encoded[0]


@pytest.mark.parametrize("kind", ["nf4", "packed", "fp8", "mxfp4"])
def test_each_rank_reads_its_own_and_files_are_whole(kind: str, tmp_path: Path) -> None:
    encodes = kind in ("nf4", "packed")
    given = {"quantization_config": QuantizedExpertsConfig(kind)} if encodes else {}
    folder = tmp_path / "whole"
    if encodes:
        tiny("qwen3_moe").save_pretrained(folder)
    else:
        save_official(folder, kind)
    alone = load(folder, dtype="float32", **given).state_dict()
    for together, experts, encoded in run_ranks(read_and_save, 2, str(folder), kind, given):
        assert together.keys() == alone.keys()
        assert all(torch.equal(value, together[key]) for key, value in alone.items())
        assert experts == {2}, "of four"
        assert encoded == (2 * 2 * 3 if encodes else 0), "gate, up and down of two experts in two layers"


def test_refused_before_anything_is_read(tmp_path: Path) -> None:
    straddling = save_official(tmp_path / "straddling", "fp8")
    for file in straddling.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:64])  # no tensor can be read
    config = straddling / "config.json"
    says = json.loads(config.read_text())
    for change, sentence in (
        ({"moe_intermediate_size": 192}, "straddle gate and up.*192 each: load it with"),
        ({"quantization_config": says["quantization_config"] | {"weight_block_size": [64, 128]}}, r"has \[64, 128\]"),
    ):
        config.write_text(json.dumps(says | change))
        with pytest.raises(ConfigError, match=sentence):
            load(straddling, dtype="bfloat16")


@pytest.mark.parametrize(("kind", "ends"), [
    ("fp8", ("3.down_proj.weight_scale_inv",)), ("fp4", tuple(f"{e}.down_proj.weight" for e in range(4))),
    ("mxfp4", ("down_proj_scales",)), ("mxfp4", ("down_proj_blocks",)), ("nf4", ("down_proj_scales",)),
    ("weights", tuple(f"{e}.down_proj.weight" for e in range(4))),
])  # fmt: skip
def test_tensors_of_codes_that_a_file_lacks_are_an_error(kind: str, ends: tuple[str, ...], tmp_path: Path) -> None:
    """A warning of MISSING, as transformers gives it, would be followed by numbers of chance."""
    if kind in ("nf4", "weights"):
        model = tiny("qwen3_moe")
        (quantize_experts(model) if kind == "nf4" else model).save_pretrained(tmp_path)
    else:
        save_official(tmp_path, kind)
    tensors = load_file(tmp_path / "model.safetensors")
    left = {name: t for name, t in tensors.items() if not name.endswith(ends)}
    assert len(left) < len(tensors)
    save_file(left, tmp_path / "model.safetensors", metadata={"format": "pt"})
    given = {"quantization_config": QuantizedExpertsConfig("nf4")} if kind == "weights" else {}
    with pytest.raises(
        ConfigError, match=r"pairs of codes and scales, for model\.layers\.0\.mlp\.experts\.down_proj.*fetch all of its"
    ):
        load(tmp_path, dtype="float32", **given)


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no experts modules"):
        quantize_experts(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="not to 'fp8'"):
        QuantizedExpertsConfig("fp8")
    with pytest.raises(ConfigError, match="codes are not drawn"):
        ExpertMLP(2, 64, 64).quantize_("nf4").reset_parameters()
    build_model("qwen3_moe").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"nf4 has blocks of 64 inputs, and Qwen3MoeExperts\.gate_up_proj has 32"):
        load(tmp_path, quantization_config=QuantizedExpertsConfig("nf4"))
    for model, says in (
        (tiny("qwen3_moe", hidden=48), "blocks of 32 outputs, which straddle gate and up in Qwen3MoeExperts: 48 each"),
        (tiny("nemotron_h", hidden=80), r"blocks of 32 outputs, and NemotronHExperts\.up_proj has 80"),
        (tiny("qwen3_moe").half(), r"float32 or bfloat16, and Qwen3MoeExperts\.gate_up_proj is in torch\.float16"),
    ):
        with pytest.raises(ConfigError, match=f"packed (has|holds weights in) {says}"):
            quantize_experts(model, "packed")
        assert marks(model) == {None}, "and is left whole"
