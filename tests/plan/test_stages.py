"""Stages of a step: extrapolated from few layers they are those of the whole model, to the byte.

python -m plan.test_stages      every family's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from plan.cases import HELD_OUT, held_out, source_of
from trimtab.plan.device import DEVICES
from trimtab.plan.stages import Stages, extrapolated, few_layers, kinds_of, measure
from trimtab.plan.trained import trained
from trimtab.plan.without_values import World
from trimtab.train.config import Mesh, TrainConfig
from trimtab.train.loading import build_model
from trimtab.train.presets import PRESETS

RECOMPUTED = {"dtype": "bfloat16", "gradient_checkpointing": True, "grad_accum": 2, "optim": "adamw_torch_fused"}
SAMPLE: list[tuple[str, int, dict[str, Any]]] = [("deepseek_v3", 8, {})]
CASES = [
    *SAMPLE, ("qwen3_moe", 2, {}), ("qwen3_moe", 6, {"gradient_checkpointing": True}), ("qwen3_moe", 12, {}),
    ("mixtral", 7, RECOMPUTED), ("olmoe", 6, {"optim": "adamw_torch_fused"}), ("gpt_oss", 10, {}),
    *((family, 8, {}) for family in HELD_OUT),
]  # fmt: skip
"""Family, layers, options. gpt_oss has two kinds in turn, deepseek_v3 two dense layers first."""


def of_layers(family: str, layers: int) -> Any:
    more = {"first_k_dense_replace": 2} if family == "deepseek_v3" else {}
    sizes = {"num_hidden_layers": layers, **more} if family in PRESETS else held_out(family, layers)["sizes"]
    return source_of(family, sizes)


def kinds(source: Any) -> list[Any]:
    with torch.device("meta"):
        return kinds_of(transformers.AutoModelForCausalLM.from_config(source))


@pytest.mark.parametrize(("family", "layers", "options"), SAMPLE)
def test_few_layers_say_what_all_hold(family: str, layers: int, options: dict[str, Any]) -> None:
    source, device, ran = of_layers(family, layers), replace(DEVICES["cpu"], foreach=True), []  # rounding is not affine
    config = TrainConfig(model=family, **{"dtype": "float32", "seq_len": 32, "batch_size": 2} | options).resolved()
    mesh, found = Mesh.of(config, world=1), kinds(source)

    def run(chosen: Sequence[int]) -> Stages:
        few = few_layers(source, chosen)
        assert kinds(few) == [found[i] for i in chosen]
        ran.append(len(chosen))
        with World(1) as world:
            model = build_model(few, config, mesh)
            world.fill(model)
            return measure(model, trained(model, config, mesh), world, device=device)

    made, whole = extrapolated(found, run), run(range(layers))
    assert made.parts == whole.parts
    assert (made.peak, made.flops) == (whole.peak, whole.flops)
    assert whole.ledger is not None
    assert whole.peak[1] == whole.ledger.peak()[0], "no place outside of the stages holds more"
    assert max(ran[:-1]) <= min(layers, 4 * len({*found}) + 1)


def main() -> None:
    for case in CASES:
        test_few_layers_say_what_all_hold(*case)
        print(*case, "to the byte", flush=True)


if __name__ == "__main__":
    main()
