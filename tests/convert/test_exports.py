"""Models that lie over ranks are written without a gather, in little memory: a file has the bytes of one process'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from helpers.convert_case import assert_same, build, logits, rewrite_config, tensors_of
from helpers.memory import MB, peak_of
from helpers.model_ranks import begin
from helpers.ranks import run_ranks
from helpers.reshard_case import Layout, Model
from trimtab.convert import files
from trimtab.convert import tensors as in_blocks
from trimtab.convert.convert import convert
from trimtab.convert.export import LiveModel
from trimtab.convert.tensors import TensorStore, infos_of
from trimtab.errors import InputError

pytestmark = pytest.mark.usefixtures("one_thread")


class Held(TensorStore):
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, self.infos = tensors, infos_of(tensors)

    def read(self, names: Any) -> dict[str, Tensor]:
        return {name: self.tensors[name] for name in names}


@pytest.mark.parametrize("block", [8, 40, 1 << 24])
def test_files_have_the_bytes_of_safetensors_own(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_blocks, "BLOCK_BYTES", block)
    g, names = torch.Generator().manual_seed(0), ["b.10", "b.9", "é", "Z", "_", 'q"', "a", "10", "ü", "b", "c", "x/y"]
    shapes = [(), (0,), (3,), (5, 2), (2, 3, 2), (4, 0, 2)]
    for shift, shape in enumerate(shapes):
        dtypes = list(files._DTYPES.values())[shift:] + list(files._DTYPES.values())[:shift]
        tensors = {
            name + str(i): torch.randint(0, 2, shapes[(shift + i) % 6] if i else shape, generator=g).to(dtype)
            for i, (name, dtype) in enumerate(zip(names, dtypes, strict=True))
        }
        files.write_safetensors(Held(tensors), tmp_path, shard_bytes=10**9)
        save_file(tensors, tmp_path / "true", metadata={"format": "pt"})
        assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "true").read_bytes()


FAMILIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("qwen3_moe", {"experts": 6}), ("qwen3_moe", {"tie_word_embeddings": True, "moe_intermediate_size": 12}),
    ("gpt_oss", {"experts": 4}), ("deepseek_v3", {"dtype": torch.bfloat16}), ("mixtral", {}),
)  # fmt: skip
"""Tensors for each expert, an uneven number on each rank; stacked ones; a bias that stays float32."""


def saved_on_ranks(folder: Path, ep: int) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    import trimtab.integrations.transformers as integration

    begin()
    integration.register()
    config = DistributedConfig(ep_size=ep, fsdp_size=dist.get_world_size(), ep_implementation="trimtab")
    DTensor.full_tensor = None  # type: ignore[assignment, method-assign]  # nobody gathers
    in_blocks.BLOCK_BYTES = 300
    (folder / "file").touch()
    for i in range(len(FAMILIES)):
        model = AutoModelForCausalLM.from_pretrained(
            folder / str(i), experts_implementation="trimtab", dtype="auto", distributed_config=config
        )
        integration.save_pretrained(model, folder / f"{i}-{ep}")
        integration.save_pretrained(model, folder / f"{i}-{ep}-several", max_shard_size=9_000)
    with pytest.raises(InputError, match="rank 0: FileExistsError"):
        integration.save_pretrained(model, folder / "file")


@pytest.mark.xdist_group("ranks4")
def test_what_ranks_save_has_the_bytes_of_what_one_process_saves(tmp_path: Path) -> None:
    for i, (name, options) in enumerate(FAMILIES):
        build(name, **options).save_pretrained(tmp_path / str(i))
    for ranks, ep in ((2, 2), (4, 2)):
        run_ranks(saved_on_ranks, ranks, tmp_path, ep, deadline=240)
        for i in range(len(FAMILIES)):
            one, two, several = tmp_path / str(i), tmp_path / f"{i}-{ep}", tmp_path / f"{i}-{ep}-several"
            assert sorted(path.name for path in one.iterdir()) == sorted(path.name for path in two.iterdir())
            assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
            assert len(list(several.glob("*.safetensors"))) > 3
            assert_same(tensors_of(one), tensors_of(several))
            facts = json.loads((several / files.INDEX).read_text())["metadata"]
            assert facts["total_parameters"] == build(*FAMILIES[i][:1], **FAMILIES[i][1]).num_parameters()


def saved_odd_on_ranks(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    from trimtab.integrations.transformers import save_pretrained

    begin()
    in_blocks.BLOCK_BYTES = 300
    mesh, model = init_device_mesh("cpu", (2,)), build("qwen3_moe")
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "true")
    for name, param in list(model.named_parameters()):
        module, _, own = name.rpartition(".")
        placed = torch.nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)]))
        setattr(model.get_submodule(module), own, placed)
    for size in (600, 9_000, "50GB", 600):
        save_pretrained(model, folder / "saved", max_shard_size=size)
    for file, size in (("model.safetensors", "50GB"), ("model-00002-of-", 600), (files.INDEX, 600)):
        into = folder / f"blocked-{file}"
        if file.endswith("-"):
            file = next((folder / "saved").glob(f"{file}*")).name
        (into / file).mkdir(parents=True, exist_ok=True)
        with pytest.raises(InputError, match=f"rank 0: .*{file}: cannot be written"):
            save_pretrained(model, into, max_shard_size=size)
    model.generation_config.temperature, model.generation_config.do_sample = 0.5, False
    with pytest.raises(InputError, match="rank 0: ValueError"):
        save_pretrained(model, folder / "refused")
    save_pretrained(get_peft_model(build("qwen3_moe"), LoraConfig(target_modules=["q_proj"])), folder / "adapter")
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()


def test_a_tensor_above_the_shard_size_and_what_fails_on_the_writer_alone(tmp_path: Path) -> None:
    run_ranks(saved_odd_on_ranks, 2, tmp_path, deadline=120)
    state = tensors_of(tmp_path / "true")
    in_files = json.loads((tmp_path / "saved" / files.INDEX).read_text())["weight_map"]
    attention = [f"model.layers.0.self_attn.{name}_proj.weight" for name in ("v", "o")]
    assert in_files[attention[0]] > in_files[attention[1]]  # the second is above the size, and comes first
    assert_same(state, tensors_of(tmp_path / "saved"))  # and no shard is left of the earlier saves


CUSTOM = {
    "sizes.py": "from transformers import Qwen3MoeConfig\nclass OwnConfig(Qwen3MoeConfig):\n"
    "    model_type = 'own_moe'\n",
    "layers.py": "from transformers import Qwen3MoeForCausalLM\nfrom .sizes import OwnConfig\n",
    "whole.py": "from .layers import OwnConfig, Qwen3MoeForCausalLM\n"
    "class OwnModel(Qwen3MoeForCausalLM):\n    config_class = OwnConfig\n",
}
"""A model's own code: its files, the last two of which import one before."""


def test_a_models_own_code_goes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers copies it: what `auto_map` names and what that imports; a conversion carries it, too."""
    from transformers import AutoModelForCausalLM, dynamic_module_utils

    from trimtab.integrations.transformers import save_pretrained

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    base = tmp_path / "base"
    build("qwen3_moe").save_pretrained(base)
    for name, text in CUSTOM.items():
        (base / name).write_text(text)
    named = {"AutoConfig": "sizes.OwnConfig", "AutoModelForCausalLM": "whole.OwnModel"}
    rewrite_config(base, model_type="own_moe", auto_map=named, architectures=["OwnModel"])
    model = AutoModelForCausalLM.from_pretrained(base, trust_remote_code=True)
    model.save_pretrained(tmp_path / "theirs")
    save_pretrained(model, tmp_path / "ours")
    theirs, ours = ({p.name: p.read_bytes() for p in (tmp_path / at).iterdir()} for at in ("theirs", "ours"))
    assert {*CUSTOM} < {*ours}
    assert ours == theirs
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", trust_remote_code=True)
    assert torch.equal(logits(again), logits(model))
    rewrite_config(base, model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"])  # as transformers knows it
    there = convert(base, tmp_path / "dcp", to="dcp").folder
    assert {*CUSTOM} < {*convert(there, tmp_path / "back", to="safetensors").files}


LAYOUTS = [Layout(ep=2, data="ddp"), Layout(ep=2, data="fsdp"), Layout(ep=2, data="hsdp"), Layout(ep=4, data="ddp"),
           Layout(ep=2, etp=2, data="ddp"), Layout(etp=2, data="fsdp")]  # fmt: skip


def read_on_ranks(writer: int) -> int:
    read = 0
    packed = torch.nn.Module()
    local = torch.arange(12.0).view(6, 2) + 100 * dist.get_rank()
    packed.weight = torch.nn.Parameter(
        DTensor.from_local(local, init_device_mesh("cpu", (4,)), [_StridedShard(0, split_factor=2)], run_check=False)
    )
    partial = torch.nn.Module()
    partial.weight = torch.nn.Parameter(
        DTensor.from_local(local, packed.weight.device_mesh, [Partial()], run_check=False)
    )
    models = [Model(experts=4) for _ in LAYOUTS]
    for model, layout in zip(models, LAYOUTS, strict=True):
        layout.spread(model)
    for model in (*models, packed, partial):
        writes = dist.get_rank() == writer
        live = LiveModel(model, write=writes)
        for name, tensor in model.state_dict().items():
            true = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            parts = [slice(a, a + 1 + a % 3) for a in range(0, len(true) - 2, 2)] if true.dim() else []
            found = [live.read([name])[name], *(live.read_rows(name, rows) for rows in parts)]
            for got, wanted in zip(found, [true, *(true[rows] for rows in parts)], strict=True):
                assert (got.shape, got.device.type) == (wanted.shape, "cpu" if writes else "meta")
                assert not writes or torch.equal(got, wanted), name
            read += len(found)
    return read


@pytest.mark.xdist_group("ranks4")
@pytest.mark.parametrize("writer", [0, 3])
def test_rows_of_any_layout_come_to_the_writer_alone(writer: int) -> None:
    assert min(run_ranks(read_on_ranks, 4, writer)) > 100


E, D, F, LAYERS = 16, 512, 1024, 4


def peaks_on_ranks(folder: Path) -> list[int]:
    """Bytes that this rank holds at most while the model is written, beside what it held before: by `save_pretrained`,
    and as `trimtab train` writes it, in another dtype."""
    from trimtab.integrations.transformers import save_pretrained
    from trimtab.train.weights import open_source, write_model

    begin()
    mesh, first = init_device_mesh("cpu", (2,)), dist.get_rank() == 0
    model = build("qwen3_moe", experts=E, hidden_size=D, moe_intermediate_size=F, num_hidden_layers=LAYERS)
    if first:
        model.save_pretrained(folder / "base")
    dist.barrier()
    source = open_source(folder / "base", model)
    for name, param in list(model.named_parameters()):
        if param.dim() == 3:
            module, _, own = name.rpartition(".")
            local = param.detach().chunk(2)[dist.get_rank()].clone()
            placed = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            setattr(model.get_submodule(module), own, torch.nn.Parameter(placed))
            del param, local
    (folder / "final").mkdir(exist_ok=True)
    save_pretrained(build("qwen3_moe"), folder / "small")  # code that is loaded by the first call
    saved = peak_of(lambda: save_pretrained(model, folder / "saved"))
    return [saved, peak_of(lambda: write_model(model, source, folder / "final", dtype="bfloat16", write=first))]


def test_a_rank_holds_little_beside_its_shard(tmp_path: Path) -> None:
    layer = 3 * E * D * F
    for held in run_ranks(peaks_on_ranks, 2, tmp_path, deadline=240):
        assert max(held) < 64 * MB, held
    for folder, width in (("saved", 4), ("final", 2)):
        assert (tmp_path / folder / "model.safetensors").stat().st_size > LAYERS * layer * width > 64 * MB
    trained = tensors_of(tmp_path / "base")
    assert_same({name: tensor.bfloat16() for name, tensor in trained.items()}, tensors_of(tmp_path / "final"))
