"""What the README shows is what is in the repository, and it runs as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import trimtab
from trimtab.verify.ranks import run_ranks

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_is_the_file() -> None:
    shown = re.search(r"<!-- examples/finetune.py -->\n```python\n(.*?)```", README, re.DOTALL)
    assert shown
    assert shown[1] == (ROOT / "examples" / "finetune.py").read_text()


def test_the_tree_and_the_proofs_name_what_exists() -> None:
    paths = [path for proof in re.findall(r"`pytest ([^`…]+)`", README) for path in proof.split()]
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []
    tree = re.search(r"```\nsrc/trimtab/\n(.*?)```", README, re.DOTALL)
    assert tree
    rooms = {p.name for p in (ROOT / "src/trimtab").iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert rooms == set(re.findall(r"^    (\w+)/", tree[1], re.MULTILINE))


def exchange_on_rank(snippet: str) -> None:
    tokens = 5 + dist.get_rank()
    names = {"trimtab": trimtab, "group": dist.group.WORLD, "x": torch.randn(tokens, 1024, requires_grad=True)}
    names |= {"expert_ids": torch.randint(0, 64, (tokens, 4)), "weights": torch.rand(tokens, 4)}
    exec(snippet, names)
    names["y"].sum().backward()
    assert names["y"].shape == names["x"].grad.shape == (tokens, 1024)


def test_the_exchange_runs_as_written() -> None:
    snippet = re.search(r"```python\n(experts = .*?)```", README, re.DOTALL)
    assert snippet
    run_ranks(exchange_on_rank, 2, snippet[1])


def layer_on_rank(snippet: str) -> None:
    torch.manual_seed(0)
    names = {"trimtab": trimtab, "nn": torch.nn, "dist": dist, "init_device_mesh": init_device_mesh}
    names |= {"x": torch.randn(1 + dist.get_rank(), 5, 256)}
    exec(snippet, names)
    grads = {name: p.grad for name, p in names["model"].named_parameters()}
    assert set(grads) == {"moe.router.weight", "moe.experts.up", "moe.experts.down"}
    assert all(g.full_tensor().isfinite().all() and g.full_tensor().any() for g in grads.values())


def test_the_layer_runs_as_written() -> None:
    snippet = re.search(r"```python\n(class Model.*?)```", README, re.DOTALL)
    assert snippet
    run_ranks(layer_on_rank, 2, snippet[1])


@pytest.mark.xdist_group("ranks2")
def test_the_example_runs_as_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "head_dim": 16, "vocab_size": 64}
    config = Qwen3MoeConfig(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, num_experts=8, **sizes)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "examples/finetune.py", str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(re.findall(r"step 9  loss \d+\.\d+", done.stdout)) == 2
