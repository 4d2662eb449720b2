"""A plan of one rank against the allocator's own count of the real step, which shares no code with the ledger.

python -m plan.test_one_rank FIRST LAST      the sweep: drawn cases by their seeds, and how far plans are off
python -m plan.test_one_rank                 families that are not among those
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from plan.cases import HELD_OUT, configured, drawn, held_out
from plan.heap_truth import most_bytes
from plan.hooked import compiled_hook, under
from trimtab.plan.device import DEVICES
from trimtab.plan.ledger import Ledger, Storage
from trimtab.plan.stages import Stages, measure
from trimtab.plan.trained import trained
from trimtab.plan.without_values import World
from trimtab.train.config import Mesh
from trimtab.train.loading import build_model

SHARE, MORE = 0.03, 12_000_000
"""How far a plan may be off: of the allocator's bytes, and what Python and PyTorch take beside tensors."""

FOREACH: dict[str, Any] = {
    "family": "mixtral",
    "sizes": {"hidden_size": 512, "num_hidden_layers": 4, "intermediate_size": 384, "head_dim": 128},
    "run": {"batch_size": 1, "seq_len": 64, "optim": "adamw_torch"},
    "foreach": True,
}
LOGITS: dict[str, Any] = {
    "family": "qwen3_moe",
    "sizes": {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 32000},
    "run": {"batch_size": 2, "seq_len": 512, "optim": "adamw_torch_fused"},
}


def planned(case: dict[str, Any]) -> Stages:
    source, config = configured(case)
    mesh = Mesh.of(config, world=1)
    with World(1) as world:
        model = build_model(source, config, mesh)
        world.fill(model)
        device = replace(DEVICES["cpu"], foreach=case.get("foreach", False))
        return measure(model, trained(model, config, mesh), world, device=device)


@pytest.fixture(scope="module")
def hook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled_hook(tmp_path_factory.mktemp("hook"))


FORGETFUL: dict[str, tuple[dict[str, Any], Callable[[Ledger, Storage], bool]]] = {
    "gradients": (FOREACH, lambda ledger, storage: storage.known == "gradients"),
    "foreach's temporaries": (FOREACH, lambda ledger, storage: "_foreach" in storage.operator),
    "logits": (LOGITS, lambda ledger, storage: storage.size == 4 * 2 * 512 * 32000),
}
"""Plans that forget something, by a case where it counts."""


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD")
@pytest.mark.parametrize("case", [FOREACH, LOGITS], ids=["foreach", "logits"])
def test_a_plan_is_what_the_allocator_counts_and_one_that_forgets_something_is_off(
    case: dict[str, Any], hook: Path, tmp_path: Path
) -> None:
    stages, bytes = planned(case), under(hook, most_bytes, case)
    ledger = stages.ledger
    assert ledger is not None
    assert stages.peak[1] == ledger.peak()[0], "the stages have the peak"
    assert abs(stages.peak[1] - bytes) <= SHARE * bytes + MORE, (stages.peak, bytes)
    for name, (of, forgets) in FORGETFUL.items():
        if of is case:
            most = peak_of(s for s in ledger.storages if not forgets(ledger, s))
            assert abs(most - bytes) > SHARE * bytes + MORE, name


def peak_of(storages: Iterable[Storage]) -> int:
    changes: Counter[int] = Counter()
    for storage in storages:
        changes[storage.born] += storage.size
        if storage.died is not None:
            changes[storage.died] -= storage.size
    return max(accumulate(changes[at] for at in sorted(changes)))


def main() -> None:
    built, off = compiled_hook(Path(mkdtemp())), []
    seeds = range(*map(int, sys.argv[1:3]))
    for case in map(drawn, seeds) if sys.argv[1:] else map(held_out, HELD_OUT):
        (stage, most), bytes = planned(case).peak, under(built, most_bytes, case)
        off.append(abs(most / bytes - 1))
        within = abs(most - bytes) <= SHARE * bytes + MORE
        said = f"{most / 1e6:8.1f} {bytes / 1e6:8.1f} MB {most / bytes - 1:+7.2%} {'' if within else 'OFF'}"
        print(f"{case['family']:16} {said} {stage} {case['run']}", flush=True)
    print(f"p95 {sorted(off)[int(0.95 * len(off))]:.2%}, worst {max(off):.2%}")


if __name__ == "__main__":
    main()
