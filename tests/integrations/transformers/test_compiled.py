"""transformers' experts and models under `torch.compile` and `torch.export`: one graph, with the bits of eager mode."""

from __future__ import annotations

import io
from collections.abc import Iterator
from types import MethodType
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parametrize

from helpers.families import build_model, experts_modules
from trimtab.errors import InputError
from trimtab.experts.plan import plan_op
from trimtab.integrations.transformers import gates

pytestmark = pytest.mark.usefixtures("registered", "one_thread")

ONE_GRAPH = (
    "aria",
    "beam",
    "cohere2_moe",
    "deepseek_v4",
    "gpt_oss",
    "minimax_m3_vl",
    "muse_spark",
    "nemotron_h",
    "openai_privacy_filter",
    "qwen3_vl_moe",
)
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


def results(run: Any, module: nn.Module, rows: int, width: int, experts: int) -> list[Tensor]:
    module.zero_grad()
    g = torch.Generator().manual_seed(rows)
    x, w = torch.randn(rows, width, generator=g).requires_grad_(), torch.rand(rows, 2, generator=g).requires_grad_()
    y: Tensor = run(x, torch.randint(0, experts, (rows, 2), generator=g), w)
    y.square().sum().backward()
    grads = [x.grad, w.grad, *(p.grad for p in module.parameters())]
    return [y.detach(), *(grad.clone() for grad in grads if grad is not None)]


def test_ids_of_int8_are_whole_among_any_number_of_experts() -> None:
    ids = torch.tensor([[0, 127]], dtype=torch.int8)
    assert plan_op(ids, 200, 2, False, "experts", "torch")[4][[0, 127]].tolist() == [1, 1]


@pytest.mark.parametrize("name", ONE_GRAPH)
def test_experts(name: str) -> None:
    module, width, experts = experts_of(name)
    counted = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counted, fullgraph=True, dynamic=True)
    for rows in (7, 0, 300, 5):
        found, truth = (results(run, module, rows, width, experts) for run in (compiled, module))
        assert len(found) == len(truth) == 3 + len(list(module.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
    assert counted.frame_count <= 3, "one more for no rows, one where the numbers of a gate were symbols at first"
    with pytest.raises(InputError, match=rf"phase experts\] {type(module).__name__}: 1 slot\(s\) have an id outside"):
        compiled(torch.randn(5, width), torch.full((5, 1), 0).index_fill(0, torch.tensor(2), experts), torch.rand(5, 1))


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_vl_moe"])
def test_exported_for_any_number_of_rows(name: str) -> None:
    module, width, experts = experts_of(name)
    rows = torch.export.Dim("rows", min=2)
    given = torch.randn(7, width), torch.randint(0, experts, (7, 2)), torch.rand(7, 2)
    program = torch.export.export(module, given, dynamic_shapes=({0: rows}, {0: rows}, {0: rows}))
    for n in (7, 40):
        x, ids, w = torch.randn(n, width), torch.randint(0, experts, (n, 2)), torch.rand(n, 2)
        assert torch.equal(program.module()(x, ids, w), module(x, ids, w))


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_vl_moe"])
def test_an_exported_program_is_saved_and_loaded(name: str) -> None:
    """Also by a process in which nobody has asked for the gate before."""
    module, width, experts = experts_of(name)
    gates._tried.cache_clear()
    given = torch.randn(7, width), torch.randint(0, experts, (7, 2)), torch.rand(7, 2)
    file = io.BytesIO()
    torch.export.save(torch.export.export(module, given, strict=False), file)
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(*given), module(*given))


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
    """As PEFT's LoRA of an experts module runs."""
    module, width, experts = experts_of("qwen3_vl_moe")
    for name in ("gate_up_proj", "down_proj"):
        parametrize.register_parametrization(module, name, Added(module.get_parameter(name)))

    def cached(run: Any) -> list[Tensor]:
        with parametrize.cached():
            return results(run, module, 7, width, experts)

    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    found, truth = cached(compiled), cached(module)
    assert len(found) == len(truth) == 3 + 4
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))


def test_what_is_changed_later_is_followed() -> None:
    module, width, experts = experts_of("qwen3_vl_moe")
    compiled = torch.compile(module, backend="aot_eager")
    results(compiled, module, 7, width, experts)

    def twice(self: Any, pre: Tensor) -> Tensor:
        return 2 * type(self)._apply_gate(self, pre)

    def same() -> list[Tensor]:
        found, truth = (results(run, module, 7, width, experts) for run in (compiled, module))
        assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
        return found

    before = same()
    module.act_fn.forward = torch.tanh
    assert not torch.equal(same()[0], before[0])
    del module.act_fn.forward
    assert torch.equal(same()[0], before[0])
    module._apply_gate = MethodType(twice, module)
    assert not torch.equal(same()[0], before[0])
