"""transformers' experts and models compiled, exported and without values: one graph, with the bits of eager mode."""

from __future__ import annotations

import io
from collections.abc import Iterator
from copy import deepcopy
from types import MethodType
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from helpers.families import build_config, build_model, experts_modules
from trimtab.errors import InputError
from trimtab.experts.plan import plan_op
from trimtab.integrations.transformers import gates

pytestmark = pytest.mark.usefixtures("registered", "one_thread")

ONE_GRAPH = (
    "aria", "beam", "cohere2_moe", "deepseek_v4", "gpt_oss", "minimax_m3_vl", "muse_spark", "nemotron_h",
    "openai_privacy_filter", "qwen3_vl_moe",
)  # fmt: skip
"""Each gate that is in C++, with and without biases, turned weights and interleaved gates; beam's own gate, and a norm
behind the experts of muse_spark."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    dynamo.reset()
    yield
    dynamo.reset()


def experts_of(name: str) -> tuple[Any, int, int]:
    """The first experts module of a family, its width and number of experts."""
    model = build_model(name)
    model.set_experts_implementation("trimtab")
    module: Any = next(iter(experts_modules(model).values()))
    up = module.get_parameter("gate_up_proj" if module.has_gate else "up_proj")
    return module, up.shape[1 if module.is_transposed else 2], up.shape[0]


def given(rows: int, width: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows)
    x, w = torch.randn(rows, width, generator=g).requires_grad_(), torch.rand(rows, 2, generator=g).requires_grad_()
    return x, torch.randint(0, experts, (rows, 2), generator=g), w


def results(run: Any, module: nn.Module, rows: int, width: int, experts: int) -> list[Tensor]:
    module.zero_grad()
    x, ids, w = given(rows, width, experts)
    y: Tensor = run(x, ids, w)
    y.square().sum().backward()
    grads = [x.grad, w.grad, *(p.grad for p in module.parameters())]
    assert all(grad is not None for grad in grads)
    return [y.detach(), *(grad.clone() for grad in grads if grad is not None)]


def alike(compiled: Any, module: nn.Module, rows: int, width: int, experts: int) -> Tensor:
    """The output; all is the same to the bit in both."""
    found, truth = (results(run, module, rows, width, experts) for run in (compiled, module))
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
    return found[0]


def test_ids_of_int8_are_whole_among_any_number_of_experts() -> None:
    ids = torch.tensor([[0, 127]], dtype=torch.int8)
    assert plan_op(ids, 200, 2, False, "experts", "torch")[4][[0, 127]].tolist() == [1, 1]


@pytest.mark.parametrize("name", ONE_GRAPH)
def test_experts(name: str) -> None:
    module, width, experts = experts_of(name)
    counted = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counted, fullgraph=True, dynamic=True)
    for rows in (7, 0, 300, 5):
        alike(compiled, module, rows, width, experts)
    assert counted.frame_count <= 3, "one more for no rows, one where the numbers of a gate were symbols at first"
    with pytest.raises(InputError, match=rf"phase experts\] {type(module).__name__}: 1 slot\(s\) have an id outside"):
        compiled(torch.randn(5, width), torch.full((5, 1), 0).index_fill(0, torch.tensor(2), experts), torch.rand(5, 1))


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_vl_moe"])
def test_exported_for_any_number_of_rows_saved_and_loaded(name: str) -> None:
    """Also by a process in which nobody has asked for the gate before."""
    module, *sizes = experts_of(name)
    gates._tried.cache_clear()
    rows = torch.export.Dim("rows", min=2)
    sample = tuple(t.detach() for t in given(7, *sizes))
    program = torch.export.export(module, sample, dynamic_shapes=({0: rows}, {0: rows}, {0: rows}))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for run in (program, torch.export.load(file)):
        for n in (7, 40):
            assert torch.equal(run.module()(*given(n, *sizes)), module(*given(n, *sizes)))


def test_a_model_is_one_graph() -> None:
    model = build_model("qwen3_moe")
    model.set_experts_implementation("trimtab")
    ids = torch.randint(0, model.config.vocab_size, (2, 160), generator=torch.Generator().manual_seed(0))
    counted, left = CompileCounterWithBackend("aot_eager"), []
    for run in (model, torch.compile(model, backend=counted, fullgraph=True)):
        model.zero_grad()
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        left.append((loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    torch.testing.assert_close(left[1], left[0], rtol=1e-4, atol=1e-6)
    assert counted.frame_count == 1


class Added(nn.Module):
    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.delta = nn.Parameter(torch.full_like(like, 0.01))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.delta


def test_parametrised_weights_that_are_cached() -> None:
    module, *sizes = experts_of("qwen3_vl_moe")
    for name in ("gate_up_proj", "down_proj"):
        parametrize.register_parametrization(module, name, Added(module.get_parameter(name)))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    found = []
    for run in (compiled, module):
        with parametrize.cached():
            found.append(results(run, module, 7, *sizes))
    assert len(found[0]) == 3 + 4
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_changes_are_followed() -> None:
    module, *sizes = experts_of("qwen3_vl_moe")
    compiled = torch.compile(module, backend="aot_eager")
    before = alike(compiled, module, 7, *sizes)
    module.act_fn.forward = torch.tanh
    assert not torch.equal(alike(compiled, module, 7, *sizes), before)
    del module.act_fn.forward
    assert torch.equal(alike(compiled, module, 7, *sizes), before)
    module._apply_gate = MethodType(lambda self, pre: 2 * type(self)._apply_gate(self, pre), module)
    assert not torch.equal(alike(compiled, module, 7, *sizes), before)


def flops(module: nn.Module, width: int, device: str) -> int:
    """Of forward and backward over 7 tokens."""
    ids = torch.zeros(7, 2, dtype=torch.long, device=device)
    x = torch.randn(7, width, device=device, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        module(x, ids, torch.rand(7, 2, device=device, requires_grad=True)).sum().backward()
    assert x.grad is not None
    assert all(p.grad is not None and p.grad.shape == p.shape for p in module.parameters())
    return int(counter.get_total_flops())


@pytest.mark.parametrize("name", ["deepseek_v4", "gpt_oss", "mixtral", "muse_spark", "nemotron_h", "qwen3_vl_moe"])
def test_without_values_there_are_shapes_and_the_same_flops(name: str) -> None:
    module, width, _ = experts_of(name)
    real = flops(module, width, "cpu")
    assert flops(deepcopy(module).to("meta"), width, "meta") == real > 0
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for child in module.modules():
            for key, p in child._parameters.items():
                child._parameters[key] = None if p is None else nn.Parameter(mode.from_tensor(p.detach()))
        assert flops(module, width, "cpu") == real


def test_a_whole_model_without_values() -> None:
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(build_config("qwen3_moe"), experts_implementation="trimtab")
        ids = torch.zeros(2, 9, dtype=torch.long)
        model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
