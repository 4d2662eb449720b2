"""Experts and models of transformers whose tensors have no values: their shapes, and FLOPs as with values."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from helpers.families import build_config, build_model, experts_modules

pytestmark = pytest.mark.usefixtures("registered", "one_thread")

FAMILIES = ("deepseek_v4", "gpt_oss", "mixtral", "muse_spark", "nemotron_h", "qwen3_vl_moe")
"""With gates and without, of their own, with biases, turned, and with a norm behind."""


def flops(module: nn.Module, device: str) -> int:
    """Of forward and backward over 7 tokens."""
    up = module.get_parameter("gate_up_proj" if module.has_gate else "up_proj")
    width = up.shape[1 if module.is_transposed else 2]
    ids = torch.zeros(7, 2, dtype=torch.long, device=device)
    x = torch.randn(7, width, device=device, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        module(x, ids, torch.rand(7, 2, device=device, requires_grad=True)).sum().backward()
    assert x.grad is not None
    assert all(p.grad is not None and p.grad.shape == p.shape for p in module.parameters())
    return int(counter.get_total_flops())


@pytest.mark.parametrize("name", FAMILIES)
def test_experts(name: str) -> None:
    model = build_model(name)
    model.set_experts_implementation("trimtab")
    module = next(iter(experts_modules(model).values()))
    real = flops(module, "cpu")
    assert flops(deepcopy(module).to("meta"), "meta") == real > 0
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for child in module.modules():
            for key, p in child._parameters.items():
                child._parameters[key] = None if p is None else nn.Parameter(mode.from_tensor(p.detach()))
        assert flops(module, "cpu") == real


def test_a_whole_model() -> None:
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(build_config("qwen3_moe"), experts_implementation="trimtab")
        ids = torch.zeros(2, 9, dtype=torch.long)
        model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
