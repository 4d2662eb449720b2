"""Whom we judge: versions, where they come from, in which arrangements, and as what they were set up.

A peer lies in `.peers/FOLDER`, which goes in front of the path when it is judged; `python -m peers --fetch` fills it.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2] / ".peers"
EP = ("1r-local", "2r-ep2", "4r-ep4", "4r-ep2")
OURS_ALONE = ("ties", "nan_logits", "bad_id")
"""Patterns that judge what we alone promise: which of equal scores goes first, errors for bad input."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is put on the path. pip: requirements, taken without what they depend on. git: a repository and its commit.

    name: as users say it. distribution: whose version is shown, where it isn't a commit.
    python: of the wheel to take, where it is another than the one that runs.
    """

    folder: str
    name: str
    distribution: str = ""
    pip: tuple[str, ...] = ()
    git: tuple[str, str] = ("", "")
    python: str = ""


SOURCES = {
    source.folder: source
    for source in (
        Source(folder="megatron-0.19", name="Megatron-Core", distribution="megatron-core",
               pip=("megatron-core==0.19.2",), python="3.12"),
        Source(folder="torchtitan", name="torchtitan", distribution="torchtitan",
               pip=("torchtitan==0.3.0", "spmd_types==0.3.1", "tyro==1.0.17", "typeguard==4.6.1",
                    "docstring_parser==0.18.0", "shtab==1.13.0")),
        Source(folder="deepspeed", name="DeepSpeed", distribution="deepspeed",
               pip=("deepspeed==0.19.8", "hjson==3.1.0", "py-cpuinfo==9.0.0", "msgpack==1.2.4", "einops==0.8.2",
                    "ninja==1.13.2")),
        Source(folder="peft", name="peft", distribution="peft", pip=("peft==0.21.2",)),
        Source(folder="llep", name="LLEP", git=("https://github.com/SalesforceAIResearch/LeastLoadedEP",
                                                "034974620fc7fbeac98e01b71f1167930761c849")),
        Source(folder="veomni", name="VeOmni", git=("https://github.com/ByteDance-Seed/VeOmni",
                                                    "d9774494f5d8042321386c65c9406e732a271501")),
        Source(folder="veomni-needs", name="what VeOmni is pinned to",
               pip=("transformers==5.9.0", "huggingface_hub==1.15.0", "tokenizers==0.22.2", "httpx==0.28.1",
                    "httpcore==1.0.9", "certifi", "diffusers==0.42.1", "nvidia-ml-py==13.615.71")),
    )
}  # fmt: skip


def fetch_all() -> int:
    """Bring all that isn't there. Nothing that they depend on comes with it: PyTorch is that which is installed."""
    for source in SOURCES.values():
        place = ROOT / source.folder
        if not place.exists():
            print(f"{source.name}: {' '.join(source.pip) or ' at '.join(source.git)}", flush=True)
            part = place.with_name(f"{place.name}.part")  # what was broken off is not taken for whole
            shutil.rmtree(part, ignore_errors=True)
            _fetch(source, part)
            part.rename(place)
    return 0


def _fetch(source: Source, place: Path) -> None:
    if source.git[0]:
        url, commit = source.git
        subprocess.run(["git", "clone", "--quiet", url, str(place)], check=True)
        subprocess.run(["git", "-C", str(place), "checkout", "--quiet", commit], check=True)
        return
    work = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if source.python:
        work += ["--python-version", source.python, "--ignore-requires-python", "--only-binary", ":all:"]
    subprocess.run([*work, "--target", str(place), *source.pip], check=True)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One subject.

    impl: what `--impl` takes. folders: of its sources. says: what was set up. around: MODULE:FUNCTION that each rank
    enters, what stands in for CUDA.
    """

    name: str
    title: str
    impl: str
    says: str
    distribution: str = ""
    folders: tuple[str, ...] = ()
    topologies: tuple[str, ...] = EP
    dtype: str = "float32"
    around: str = ""

    def options(self) -> dict[str, Any]:
        """What `run_local` is given besides."""
        module, _, function = self.around.partition(":")
        return {"around": getattr(importlib.import_module(module), function)} if module else {}


def peers() -> Iterator[Peer]:
    """All of them, in the order of the page."""
    topologies = ("1r-local", "2r-fsdp-local", "2r-ddp-local", "2r-ep2", "2r-ep2-fsdp", "2r-ep2-tp2-replicated",
                  "4r-ep4", "4r-ep2", "4r-ep2-fsdp", "2r-fsdp-local-adamw", "2r-ep2-adamw", "4r-ep2-fsdp-adamw",
                  "2r-ep2-muon", "4r-ep2-fsdp-muon")  # fmt: skip
    block = "Qwen3MoeSparseMoeBlock, laid out by the functions that `from_pretrained` calls"
    for name, experts, part in (("transformers", "grouped_mm", "Impl"), ("transformers-eager", "eager", "Eager")):
        yield Peer(
            name=name, title=f"transformers, all_to_all, experts {experts}", impl=f"peers.transformers_impl:{part}",
            distribution="transformers", topologies=topologies,
            says=f'{block}; `ep_implementation="all_to_all"`, `experts_implementation="{experts}"`',
        )  # fmt: skip
    says = (
        "`MoE` from its configuration; its experts compute in bfloat16 whatever comes in, so it is judged in bfloat16"
    )
    one = "; of its two exchanges the one without `spmd_types`, which asks Gloo for what it can't do"
    for name, kind, part, more, asked in (
        ("torchtitan-local", "LocalTokenDispatcher", "Local", "", ("1r-local", "2r-local")),
        ("torchtitan", "AllToAllTokenDispatcher", "Impl", one, EP),
    ):
        yield Peer(
            name=name, title=f"torchtitan, {kind}", impl=f"peers.torchtitan_impl:{part}", distribution="torchtitan",
            folders=("torchtitan",), dtype="bfloat16", topologies=asked, says=says + more,
        )  # fmt: skip
    says = "`deepspeed.initialize` over transformers' Qwen3-MoE blocks, `expert_parallel` enabled, "
    for name, title, part, more in (
        ("deepspeed", "experts in a loop", "Impl", "`use_grouped_mm` false, ZeRO 0"),
        ("deepspeed-grouped-mm", "experts grouped_mm", "Grouped", "ZeRO 0"),
        ("deepspeed-zero1", "ZeRO 1", "Zero1", "`use_grouped_mm` false"),
        ("deepspeed-zero2", "ZeRO 2", "Zero2", "`use_grouped_mm` false"),
    ):
        yield Peer(
            name=name, title=f"DeepSpeed AutoEP, {title}", impl=f"peers.deepspeed_impl:{part}", says=says + more,
            distribution="deepspeed", folders=("deepspeed",), topologies=(*EP, "2r-local"),
        )  # fmt: skip
    lora = "`LoraConfig(target_parameters=[…])`, r 4, on transformers' experts"
    for name, experts, part in (("peft", "grouped_mm", "Impl"), ("peft-eager", "eager", "Eager")):
        yield Peer(
            name=name, title=f"peft, LoRA of experts, {experts}", impl=f"peers.peft_impl:{part}", distribution="peft",
            folders=("peft",), topologies=("1r-local", "2r-local", "2r-ep2"),
            says=f"{lora} ({experts}); over ranks on the experts that transformers has laid out",
        )  # fmt: skip
    yield Peer(
        name="veomni", title="VeOmni, its expert parallelism", impl="peers.veomni_impl:Impl",
        folders=("veomni-needs", "veomni"), topologies=EP[1:],
        says="`dispatch_to_ep_class` with `EPMergedFc1GroupGemm`. On a CPU it needs stand-ins: an answer for the "
        "capability of a GPU that it asks for when it is imported, loops for its two Triton kernels, and a flat view "
        "for one all-gather that Gloo takes in no other shape",
    )  # fmt: skip
    yield Peer(
        name="llep", title="LLEP", impl="peers.llep_impl:Impl", folders=("llep",), dtype="float64",
        says="`gptoss_llep_forward`, `min_tokens_per_gemm=1` so that a case's few tokens do move; alpha 1 and a bias "
        "of -1 make its gpt-oss experts the truth's SwiGLU, to rounding: so float64. It is provided for research",
    )  # fmt: skip
    topologies = ("1r-local", "2r-ep2", "2r-etp2-local", "4r-ep4", "4r-ep2-etp2", "4r-ep4-tp2-sharded")
    own = "`MoELayer`, its router, `{}`, SequentialMLP".format
    for version, folders in (("0.16", ()), ("0.19", ("megatron-0.19",))):
        for name, part, title, says in (
            ("megatron", "Impl", "alltoall", own("alltoall")),
            ("megatron-allgather", "AllGather", "allgather", own("allgather")),
            ("megatron-trimtab", "Trimtab", "with trimtab",
             "`trimtab.megatron.use(spec)`: its router, our dispatch, experts"),
        ):  # fmt: skip
            yield Peer(
                name=f"{name}-{version}", title=f"Megatron-Core {version}, {title}",
                says=f"{says}; what stands in for CUDA is in tests/helpers/megatron_cpu.py, each with its reason",
                impl=f"peers.megatron_impl:{part}", distribution="megatron-core", folders=folders,
                topologies=topologies, around="helpers.megatron_cpu:cuda_stood_in",
            )  # fmt: skip


def peer_named(name: str) -> Peer:
    """The peer of that name. Raises KeyError where there is none."""
    return {peer.name: peer for peer in peers()}[name]
