"""Composite models: their text part is trained as in the whole model, all else comes back bit for bit."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from helpers import composites
from helpers.families import LOADED_WRONG_WHEN_SHARDED, REFUSED_WHEN_SHARDED, build_model, save_model
from helpers.forked import run_forked
from helpers.train_runs import assert_same_bits, assert_same_run
from trimtab.convert.steps import moved_rows
from trimtab.errors import ConfigError
from trimtab.integrations.transformers.composite import language_model_class
from trimtab.train.assistant_spans import IGNORED
from trimtab.train.loading import mask_by_positions
from trimtab.train.models import keeps_documents_apart
from trimtab.train.packing import RankBlocks
from trimtab.train.plan import plan_run
from trimtab.train.resume import resumed
from trimtab.train.session import run_session
from trimtab.train.weights import open_source

pytestmark = pytest.mark.xdist_group("train_composites")


@pytest.fixture(scope="module", params=composites.FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return composites.save_composite(request.param, tmp_path_factory.mktemp("checkpoints") / request.param)


def test_the_text_part_learns_as_in_the_whole_model(base: Path, text: Path, tmp_path: Path) -> None:
    plan = composites.train_composite(base, text, tmp_path / "run")
    whole, trained = composites.load_whole(base).train(), composites.load_whole(tmp_path / "run/final").state_dict()
    before = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    sgd = torch.optim.SGD(whole.parameters(), lr=composites.RATE)
    rows = iter(RankBlocks(plan.blocks(), batch=2, rank=0, size=1, seed=0))
    for _ in range(2):
        batch = list(islice(rows, 2))
        nlls = [_nll(whole, row) for row in batch]
        targets = sum(int((row["labels"][1:] != IGNORED).sum()) for row in batch)
        (sum(nlls) / targets).backward()
        learned = {name for name, p in whole.named_parameters(remove_duplicate=False) if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        sgd.step()
        sgd.zero_grad()
    wanted = whole.state_dict()
    assert trained.keys() == wanted.keys()
    assert any("experts" in name for name in learned)
    for name, value in wanted.items():
        if name in learned:
            moved = [weight - before[name] for weight in (trained[name], value)]
            torch.testing.assert_close(*moved, rtol=1e-3, atol=2e-6, msg=partial("{}: {}".format, name))
        else:
            assert torch.equal(trained[name], before[name]), name
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "run/final", base))
    assert {name: t.dtype for name, t in ours.items()} == {name: t.dtype for name, t in theirs.items()}
    assert (tmp_path / "run/final/preprocessor_config.json").read_bytes() == (
        base / "preprocessor_config.json"
    ).read_bytes()


def _nll(whole: Any, row: dict[str, torch.Tensor]) -> torch.Tensor:
    real = int(row["real"].sum()) if "position_ids" in row else len(row["real"])  # what fills up is apart there
    logits = whole(input_ids=row["input_ids"][None, :real], use_cache=False).logits[0].float()
    return F.cross_entropy(logits[:-1], row["labels"][1:real], ignore_index=IGNORED, reduction="sum")


def test_documents_of_one_row_are_apart(base: Path) -> None:
    """Where `trimtab train` packs; the whole model has them one by one."""
    whole = composites.load_whole(base)
    part = language_model_class(whole.config).from_pretrained(base, experts_implementation="eager")
    if not keeps_documents_apart(part):
        return
    mask_by_positions(part)
    ids, sizes = torch.arange(100, 126).reshape(2, 13), (6, 7)
    positions = torch.cat([torch.arange(size) for size in sizes]).expand(2, -1)
    with torch.no_grad():
        packed = part(input_ids=ids, position_ids=positions, use_cache=False).logits
        apart = [whole(input_ids=rows, use_cache=False).logits for rows in ids.split(sizes, 1)]
    torch.testing.assert_close(packed, torch.cat(apart, 1), atol=1e-5, rtol=1e-5)


FEW = ("qwen3_vl_moe", "ernie4_5_vl_moe")
"""A family like most, and one that has experts of images among those of text."""


@pytest.mark.parametrize("family", FEW)
def test_one_and_one_step_are_two(family: str, text: Path, tmp_path: Path) -> None:
    base = composites.save_composite(family, tmp_path / "base")
    adam: dict[str, Any] = {"optim": None, "lr": 0.01, "save_every": 1}
    composites.train_composite(base, text, tmp_path / "whole", **adam)
    composites.train_composite(base, text, tmp_path / "parts", **adam, stop_after=1)
    assert not (tmp_path / "parts/final").exists()
    run_session(plan_run(resumed({"resume": str(tmp_path / "parts")}), 1), prepared=False)
    assert_same_bits(tmp_path / "parts", tmp_path / "whole", 2)


@pytest.mark.parametrize(("family", "mesh"), [("glm4v_moe", {"ep": 2}), ("qwen3_vl_moe", {"replicate": 2})])
def test_two_ranks_have_the_numbers_of_one_process(
    family: str, mesh: dict[str, int], text: Path, tmp_path: Path
) -> None:
    """Experts shared out, or copies; what is not trained has its bits."""
    base = composites.save_composite(family, tmp_path / "base")
    composites.train_composite(base, text, tmp_path / "alone")
    run_forked(composites.options(base, text, tmp_path / "pair", batch_size=1, **mesh), 2)
    assert_same_run(tmp_path / "pair", tmp_path / "alone")
    ours, theirs, old = (load_file(tmp_path / f / "model.safetensors") for f in ("pair/final", "alone/final", "base"))
    assert ours.keys() == theirs.keys() == old.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6)
        assert torch.equal(ours[name], old[name]) == torch.equal(value, old[name]), name


def test_what_transformers_loads_wrong_over_ranks_is_refused_by_name(base: Path, text: Path, tmp_path: Path) -> None:
    wrong = base.name in composites.SHARDED_WRONG
    words = r"--nproc 2: transformers loads \S+ of \w+ wrong"
    with pytest.raises(ConfigError, match=words) if wrong else nullcontext():
        plan_run(composites.options(base, text, tmp_path / "run", batch_size=1), 2)


@pytest.mark.parametrize("family", sorted(LOADED_WRONG_WHEN_SHARDED | REFUSED_WHEN_SHARDED))
def test_language_models_that_transformers_loads_wrong_over_ranks(family: str, tmp_path: Path) -> None:
    source = open_source(save_model(family, tmp_path), build_model(family))
    assert moved_rows(source.mapping)


def test_experts_that_transformers_runs_itself_are_refused_by_name(text: Path, tmp_path: Path) -> None:
    base = composites.save_composite("step3p7", tmp_path / "base")
    with pytest.raises(ConfigError, match=r"Step3p7ForConditionalGeneration has no experts that transformers hands"):
        composites.train_composite(base, text, tmp_path / "run")


def test_the_page_lists_every_family_of_the_registry() -> None:
    page = (Path(__file__).parent.parent.parent / "docs/howto/train.md").read_text(encoding="utf-8")
    assert composites.listed() in page, (
        "PYTHONPATH=tests python -m helpers.composites prints what docs/howto/train.md is to list"
    )
