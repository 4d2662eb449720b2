"""Codes of experts over ranks by transformers' `DistributedConfig`: read, adapted, saved, read at another degree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from helpers.coded_checkpoints import save_official, tiny
from helpers.coded_ranks import read_and_save
from helpers.ep_case import Case, Mesh
from helpers.ep_ranks import REPLICATED
from helpers.ep_verify import verify
from helpers.ranks import run_ranks
from trimtab.integrations.transformers import QuantizedExpertsConfig

pytestmark = pytest.mark.usefixtures("registered", "one_thread")


def adapted(family: str, mesh: Mesh, lora: str = "experts", name: str = "trimtab") -> Case:
    return Case(
        family=family, mesh=mesh, lora=lora, codes="int8", patterns=("uneven", "cold"), experts=name, exchange=name
    )  # fmt: skip


def test_adapters_on_codes_over_two_ranks(tmp_path: Path) -> None:
    two = Mesh(ep=2, fsdp=2)
    cases = [adapted(family, two) for family in ("qwen3_moe", "gpt_oss", "nemotron_h", "ernie4_5_vl_moe")]
    verify([*cases, *(adapted(family, two, name=REPLICATED) for family in ("qwen3_moe", "gpt_oss"))], tmp_path)
    verify([adapted("qwen3_moe", Mesh(ep=2, fsdp=1, tp=2))], tmp_path)


@pytest.mark.xdist_group("ranks4")
def test_adapters_on_codes_that_fsdp_shards(tmp_path: Path) -> None:
    verify([adapted("qwen3_moe", Mesh(ep=2, fsdp=4), "attention", name) for name in ("trimtab", REPLICATED)], tmp_path)


@pytest.mark.parametrize("kind", ["nf4", "fp8", "mxfp4"])
def test_each_rank_reads_its_own_and_files_are_whole(kind: str, tmp_path: Path) -> None:
    given = {"quantization_config": QuantizedExpertsConfig(kind)} if kind == "nf4" else {}
    if kind == "nf4":
        tiny("qwen3_moe").save_pretrained(tmp_path)
    else:
        save_official(tmp_path, kind)
    alone = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="float32", experts_implementation="trimtab", **given
    ).state_dict()
    for whole, mine, encoded in run_ranks(read_and_save, 2, str(tmp_path), kind, given):
        assert whole.keys() == alone.keys()
        assert all(torch.equal(value, whole[key]) for key, value in alone.items())
        assert {shape[0] for shape in mine.values()} == {2}, "of four experts"
        assert encoded == (2 * 2 * 3 if kind == "nf4" else 0), "gate, up and down of two experts in two layers"
