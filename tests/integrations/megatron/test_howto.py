"""What docs/howto/megatron.md shows is what runs."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

import trimtab
from helpers.megatron_cpu import cuda_stood_in, megatron
from helpers.megatron_gpt import Layout, Run, config_of
from helpers.ranks import run_ranks
from trimtab.integrations.megatron import layer, protocol, specs

PAGE = (Path(__file__).parents[3] / "docs/howto/megatron.md").read_text()
TWO_LINES, SCRIPT, BRIDGE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

NUMBERS = re.compile(r"\d+\.\d+")


def config() -> Any:
    return config_of(Layout(), Run(model={"transformer_impl": "local", "moe_layer_freq": [0, 1]}))


def mlps(block: Any) -> list[Any]:
    return [getattr(layer.submodules.mlp, "module", None) or layer.submodules.mlp.func for layer in block.layer_specs]


def test_two_lines() -> None:
    found: dict[str, Any] = {"config": config()}
    with cuda_stood_in():
        megatron.core.parallel_state.set_pipeline_model_parallel_rank(0)
        megatron.core.parallel_state.set_pipeline_model_parallel_world_size(1)
        exec(TWO_LINES, found)
    dense, ours = mlps(found["spec"])
    assert ours is trimtab.megatron.MoELayer
    assert dense is not ours
    assert issubclass(ours, protocol.MegatronMoELayer)


def run_script() -> list[tuple[float, float]]:
    """As torchrun starts it on GPUs: the process group is there already, and CUDA is stood in for."""
    seen: list[tuple[float, float]] = []
    names = {"__name__": "__main__", "print": lambda line: seen.append(tuple(map(float, NUMBERS.findall(line))))}
    with cuda_stood_in(), patch.object(torch.cuda, "set_device", lambda device: None):
        exec(SCRIPT.replace('dist.init_process_group("nccl")', ""), names)
    assert {type(layer.mlp) for layer in names["model"].module.decoder.layers} == {trimtab.megatron.MoELayer}
    return seen


def test_the_script_trains_on_two_ranks() -> None:
    one, two = run_ranks(run_script, 2, deadline=120)
    assert [norm for _, norm in one] == [norm for _, norm in two]
    assert len(one) == 5
    assert one[-1][0] < one[0][0]
    assert two[-1][0] < two[0][0]


def test_a_provider_with_a_function_for_its_spec() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    provider = SimpleNamespace(transformer_layer_spec=lambda config: get_gpt_layer_local_spec(config.num_moe_experts))
    exec(BRIDGE, {"provider": provider, "trimtab": trimtab})
    spec = provider.transformer_layer_spec(config())
    assert mlps(SimpleNamespace(layer_specs=[spec])) == [trimtab.megatron.MoELayer]


def test_specs_by_name_are_there() -> None:
    module, name = re.findall(r"--spec (\S+) (\S+)\n", PAGE)[0]
    assert module == specs.__name__
    assert {name, "gpt_exchange"} <= set(vars(specs))  # Megatron looks there, and calls nothing


def test_what_is_refused_is_on_the_page() -> None:
    assert [name for name in layer.REFUSED if f"`{name}`" not in PAGE] == []
