"""What the README shows is what is in the repository, and it runs as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

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


CASE = re.compile(r"([ABC]), (bf16|fp32), (2048|8192) tokens, [12] threads?(, [24] ranks)?")


def span(page: str, shapes: str, dtypes: str, ranks: bool) -> str:
    """The least and the most that a page quotes: times as fast as the fastest peer (time over the limit)."""
    found = []
    for line in (ROOT / "docs" / page).read_text().splitlines():
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        if len(cells) != 15 or cells[1] != "forward+backward" or cells[2] not in ("auto", "auto shared_memory"):
            continue
        case = CASE.fullmatch(cells[0])
        if case and cells[5] and case[1] in shapes and case[2] in dtypes and bool(case[4]) == ranks:
            found.append((float(cells[10]), float(cells[14])))
    assert len(found) > 3
    (least, nearest), (most, farthest) = (tuple(f(each) for each in zip(*found, strict=True)) for f in (min, max))
    return f"{least:.2f} to {most:.2f} ({nearest:.2f} to {farthest:.2f})"


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("Intel, AMX", "benchmarks.md"),
        ("AMD, family 26", "benchmarks-zen5.md"),
        ("AMD, family 25", "benchmarks-zen4.md"),
    ],
)
def test_the_speeds_are_those_of_the_pages(name: str, page: str) -> None:
    columns = (("AB", "bf16", False), ("C", "bf16", False), ("ABC", "fp32", False), ("ABC", "bf16 fp32", True))
    cells = " | ".join(span(page, *column) for column in columns)
    assert f"| [{name}](docs/{page}) | {cells} |" in README.splitlines()


EXCHANGE = """
y.sum().backward()
assert y.shape == x.grad.shape == (5 * group.rank(), 1024)
assert all(p.grad is not None for p in experts.parameters())
assert x.grad.any() == (group.rank() > 0)
print("well")
"""
LAYER = """
grads = {name: p.grad for name, p in model.named_parameters()}
assert set(grads) == {"moe.router.weight", "moe.experts.gate_up", "moe.experts.down"}
assert all(g.full_tensor().isfinite().all() and g.full_tensor().any() for g in grads.values())
print("well")
"""


@pytest.mark.xdist_group("ranks2")
@pytest.mark.parametrize(
    ("needle", "then"), [("dispatcher.dispatch", EXCHANGE), ("class Model", LAYER)], ids=["exchange", "layer"]
)
def test_snippets_run_as_written(needle: str, then: str, tmp_path: Path) -> None:
    (snippet,) = (each for each in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if needle in each)
    script = tmp_path / "snippet.py"
    script.write_text(snippet + then)
    assert torchrun(script).count("well") == 2


@pytest.mark.xdist_group("ranks2")
def test_the_example_runs_as_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "head_dim": 16, "vocab_size": 64}
    config = Qwen3MoeConfig(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, num_experts=8, **sizes)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    assert len(re.findall(r"step 9  loss \d+\.\d+", torchrun("examples/finetune.py", tmp_path))) == 2


def torchrun(*command: object) -> str:
    """What two ranks print; they must end well."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, *map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
