"""The experts module of every family alone, fed what its model feeds it: bfloat16, and slots that are dropped.

The model-level tests compare in the precisions where routing can't flip; here the calls of a bfloat16 model are
recorded once and replayed, so that rounding stays inside one module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import trimtab.integrations.transformers
from helpers.families import build_model, experts_modules, family_names, forward, sample_batch
from helpers.model_truth import FLOAT32_INSIDE, difference, scale
from helpers.wrapped import Quantised
from trimtab.errors import ConfigError, InputError
from trimtab.integrations.transformers.experts import experts_forward
from trimtab.kernels.choose import KernelChoice

NAMES = family_names()
IMPL = "trimtab"

pytestmark = pytest.mark.usefixtures("registered", "one_thread")


@pytest.fixture(autouse=True)
def no_graph_stays() -> Iterator[None]:
    """What was compiled would be found by others."""
    yield
    torch._dynamo.reset()


Given = tuple[Tensor, Tensor, Tensor]
"""Hidden states, ids and weights."""


def first_call(name: str, dtype: torch.dtype) -> tuple[Any, Given]:
    """The first call of an experts module in a forward of the family's model."""
    model = build_model(name, 0, dtype)
    model.set_experts_implementation("eager")
    calls: list[Any] = []
    for module in experts_modules(model).values():
        module.register_forward_pre_hook(lambda m, args: calls.append((m, tuple(a.detach().clone() for a in args))))
    with torch.no_grad():
        forward(model, sample_batch(model, 2, 12))
    module, given = calls[0]
    module._forward_pre_hooks.clear()
    return module, given


def replay(
    experts: Any, given: Given, implementation: str, dtype: torch.dtype | None = None, *, autocast: bool = False
) -> dict[str, Tensor]:
    """Output and gradients of the call, by name, under an implementation and perhaps in another dtype."""
    module = copy.deepcopy(experts)
    if dtype is not None:
        module.to(dtype)
    module.config = copy.deepcopy(experts.config)
    module.config._experts_implementation = implementation
    hidden, index, weights = given
    leaves = [t.to(dtype or t.dtype, copy=True).requires_grad_() for t in (hidden, weights)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = module(leaves[0], index.clone(), leaves[1])
    generator = torch.Generator().manual_seed(7)
    output.backward(torch.randn(output.shape, generator=generator, dtype=torch.float32).bfloat16().to(output))
    values = dict(zip(("hidden.grad", "weights.grad"), leaves, strict=True)) | dict(module.named_parameters())
    assert all(value.grad is not None for value in values.values())
    return {"output": output.detach()} | {key: value.grad for key, value in values.items()}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_rounds_no_worse_than_the_loop(name: str, autocast: bool) -> None:
    """Of a bfloat16 module, and of a float32 one under autocast."""
    call = first_call(name, torch.float32 if autocast else torch.bfloat16)
    exact = replay(*call, "eager", torch.float64)
    loop, ours = (replay(*call, implementation, autocast=autocast) for implementation in ("eager", IMPL))
    if autocast:
        assert not torch.equal(ours["output"], replay(*call, IMPL)["output"]), "it is not float32 that was multiplied"
    for key, value in exact.items():
        assert ours[key].dtype == loop[key].dtype, key
        assert ours[key].dtype == torch.float32 or not autocast, key
        allowed = max(2 * difference(loop[key], value), 2**-7 * scale(value))
        error = difference(ours[key], value)
        assert error <= allowed, f"{key}: off by {error:.2e}, allowed {allowed:.2e}, scale {scale(value):.2e}"


@pytest.mark.parametrize("name", NAMES)
def test_a_slot_without_a_local_expert_is_dropped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What expert parallelism marks as not here costs nothing and says nothing, whatever its weight is."""
    module, (hidden, index, weights) = first_call(name, torch.float32)
    num_experts, generator = int(module.num_experts), torch.Generator().manual_seed(3)
    dropped = torch.rand(index.shape, generator=generator) < 0.4
    dropped[0] = True  # a token all of whose experts are elsewhere
    outside = torch.tensor([-1, num_experts, num_experts + 5])[torch.randint(3, dropped.shape, generator=generator)]
    marked = (hidden, torch.where(dropped, outside, index), weights.masked_fill(dropped, 0.75))
    wanted = replay(module, (hidden, index, weights.masked_fill(dropped, 0.0)), "eager", torch.float64)
    with pytest.raises(InputError, match=rf"{dropped.sum()} slot\(s\) have an id outside 0..{num_experts - 1}"):
        replay(module, marked, IMPL, torch.float64)
    monkeypatch.setattr(module, "_is_expert_parallel", True)
    ours = replay(module, marked, IMPL, torch.float64)
    wanted["weights.grad"] = wanted["weights.grad"].masked_fill(dropped, 0.0)
    relative = FLOAT32_INSIDE.get(name, 1e-10)
    for key, value in wanted.items():
        assert difference(ours[key], value) <= relative * scale(value), key


def qwen(**changes: Any) -> nn.Module:
    """Experts of Qwen3-MoE, as a user may have changed them."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=16, moe_intermediate_size=8, num_experts=4)
    config._experts_implementation = IMPL
    torch.manual_seed(0)
    module = Qwen3MoeExperts(config)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_()
    for name, value in changes.items():
        setattr(module, name, value)
    return module


def rows(count: int = 6, ids: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    slots = count if ids is None else ids
    torch.manual_seed(1)
    return torch.randn(count, 16), torch.randint(0, 4, (slots, 2)), torch.rand(slots, 2)


def test_parameters_that_others_take_the_place_of_are_those_that_are_trained() -> None:
    """Of a norm behind the experts and of an activation, too."""
    gradients = {}
    for implementation in ("eager", IMPL):
        model = build_model("muse_spark", 0, torch.float64)
        model.set_experts_implementation(implementation)
        torch.manual_seed(0)
        params = {n: (p.detach() + 0.1 * torch.randn_like(p)).requires_grad_() for n, p in model.named_parameters()}
        batch = sample_batch(model, 2, 7)
        batch.pop("labels", None)
        torch.func.functional_call(model, params, (), batch).last_hidden_state.square().mean().backward()
        gradients[implementation] = {n: p.grad for n, p in params.items() if p.grad is not None}
    assert any("post_expert_norm" in name for name in gradients[IMPL])
    torch.testing.assert_close(gradients[IMPL], gradients["eager"], rtol=1e-5, atol=1e-9)


class Scaled(nn.Module):
    """Promotes what comes in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.scale


class Mixed(nn.Module):
    """Multiplies, in what autocast says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(torch.tanh(x))
        return y


@pytest.mark.parametrize("act_fn", [Scaled, Mixed])
@pytest.mark.parametrize("kernels", ["auto", "torch", "grouped_mm"])
def test_an_activation_with_wide_parameters_under_autocast(act_fn: type[nn.Module], kernels: str) -> None:
    module, found = qwen(act_fn=act_fn()), []
    for ours in (True, False):
        module.zero_grad()
        x, ids, w = rows()
        x.requires_grad_()
        module.config._experts_implementation = "eager"
        with torch.autocast("cpu", torch.bfloat16):
            y = experts_forward(module, x, ids, w, kernels=KernelChoice(kernels)) if ours else module(x, ids, w)
        (y * torch.linspace(-1, 1, 16)).sum().backward()
        found.append({"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in module.named_parameters()}})
    for name, value in found[1].items():
        assert found[0][name].dtype == value.dtype, name
        assert difference(found[0][name], value) <= 2**-5 * scale(value), name


class OwnGate(nn.Module):
    """What a gate of one's own may be made of, beside the stacked weights: trained, frozen, computed, in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.linspace(0.5, 2, 8))
        self.frozen = nn.Parameter(torch.linspace(1, 3, 8), requires_grad=False)
        self.norm = nn.RMSNorm(8)

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.frozen * self.norm(gate) * torch.sigmoid(self.beta * gate) * up  # type: ignore[no-any-return]


def own_gate(**changes: Any) -> Any:
    """Experts of Qwen3-MoE whose gate is a method that uses parameters of the module itself."""
    module: Any = qwen(**dict(OwnGate().named_parameters(recurse=False)), norm=nn.RMSNorm(8), **changes)
    kind = type(module)
    gate: Any = {"_apply_gate": lambda self, pre: OwnGate.forward(self, *pre.chunk(2, -1))}
    module.__class__ = type("OwnExperts", (kind,), gate)
    parametrize.register_parametrization(module, "beta", nn.Softplus())
    parametrize.register_parametrization(module, "down_proj", nn.Identity())
    return module


WAYS: dict[str, Any] = {
    "itself": lambda module, *given: module(*given),
    "run again": lambda module, *given: checkpoint(module, *given, use_reentrant=False),
    "others in place": lambda module, *given: torch.func.functional_call(
        module, {name: 1.5 * p for name, p in module.named_parameters()}, given
    ),
    "compiled": lambda module, *given: torch.compile(module, backend="eager")(*given),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_parameter_of_a_gate_of_ones_own_has_its_gradient(way: str) -> None:
    """Neither a stacked weight nor what one is computed from is the gate's."""
    x, ids, w = rows()
    found = {}
    for implementation in ("grouped_mm", IMPL):  # Qwen3-MoE's own loop does not ask for the gate
        module = own_gate()
        module.config._experts_implementation = implementation
        WAYS[way](module, x, ids, w).square().sum().backward()
        found[implementation] = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    assert len(found[IMPL]) == 4
    torch.testing.assert_close(found[IMPL], found["grouped_mm"], rtol=1e-3, atol=1e-2)


def calls(module: Any) -> dict[str, tuple[Callable[[], Any], type[Exception], str]]:
    """By what is wrong: what is run, and what it ends with."""
    x, ids, w = rows()
    shapes, own = r"ids \[T, K\]", "transformers' own"
    found: dict[str, Any] = {
        "1 dim": (lambda: module(x, ids[:, 0], w[:, 0]), InputError, shapes),
        "func": (lambda: torch.func.grad(lambda x: module(x, ids, w).sum())(x), InputError, r"torch\.func"),
        "jit": (lambda: torch.jit.trace(module, (x, ids, w)), InputError, r"torch\.jit"),
    }
    for count, slots in ((4, 60_000), (4, 6), (6, 4)):
        found[f"{count} {slots}"] = partial(module, *rows(count, slots)), InputError, shapes
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(module, name).detach()
        for dtype in (torch.int8, torch.float8_e4m3fn) if name == "gate_up_proj" else ():
            narrow = qwen(**{name: nn.Parameter(weight.to(dtype), requires_grad=False)})
            found[str(dtype)] = partial(narrow, x, ids, w), ConfigError, f"has weights in {dtype}.*{own}"
        coded = qwen(**{name: nn.Parameter(Quantised(weight), requires_grad=False)})
        says = rf"has weights in a Quantised of torch\.float32.*{own}"
        found[f"coded {name}"] = partial(coded, x, ids, w), ConfigError, says
        found[f"compiled {name}"] = partial(torch.compile(coded, backend="eager"), x, ids, w), ConfigError, says
    return found


def test_calls_that_are_refused_by_name() -> None:
    for case, (run, kind, says) in calls(qwen()).items():
        with pytest.raises(kind, match=says):
            pytest.fail(f"{case}: {run()}")


def test_fp8_experts_of_transformers_run_on_their_codes() -> None:
    from transformers import Qwen3MoeConfig
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
    from transformers.integrations.moe import use_experts_implementation

    config = Qwen3MoeConfig(hidden_size=128, moe_intermediate_size=128, num_experts=4)
    config._experts_implementation = IMPL
    kind = use_experts_implementation(experts_class=FP8Experts, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)
    x, ids, w = torch.randn(3, 128, requires_grad=True), torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2)
    with pytest.raises(ConfigError, match=r"float8_e4m3fn.*transformers' own"):
        kind(config, block_size=(64, 64))(x, ids, w)
    config.dtype = torch.float32
    module = kind(config, block_size=(128, 128))
    for name in ("gate_up_proj", "down_proj"):
        weight, grid = getattr(module, name), getattr(module, f"{name}_scale_inv")
        weight.data.copy_(torch.randn(weight.shape).to(weight.dtype))
        grid.data.fill_(0.1)
    y = module(x, ids, w)
    y.sum().backward()
    gate, up = (x @ (module.gate_up_proj[0].float() * 0.1).T).chunk(2, -1)
    truth = 2 * (torch.nn.functional.silu(gate) * up) @ (module.down_proj[0].float() * 0.1).T
    assert torch.allclose(y, truth, rtol=1e-4, atol=1e-4)
    (given,) = torch.autograd.grad(truth.sum(), x)
    assert torch.allclose(x.grad, given, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": "grouped_mm"}, "transformers has an implementation of that name"),
        ({"name": "eager"}, "transformers has"),
        ({"name": "all_to_all"}, "transformers has an implementation of that name"),
        ({"name": ""}, "must be a word"),
        ({"name": 3}, "must be a word"),
        ({"combine": "bogus"}, "is not one of"),
        ({"transport": "bogus"}, "is not one of"),
        ({"replicate_experts": "bogus"}, "is neither 'off', 'auto' nor a tolerance"),
        ({"replicate_experts": -0.1}, "must be None or a number from 0"),
        ({"kernels": "bogus"}, "is not one of"),
    ],
    ids=str,
)
def test_registering_under_a_name_or_with_options_that_cannot_be(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trimtab.integrations.transformers.register(**given)
    trimtab.integrations.transformers.register()  # again
    for other in (
        {"combine": "ordered"}, {"transport": "allgather"}, {"replicate_experts": "auto"}, {"kernels": "torch"},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="registered with ExchangeOptions\\(transport='alltoall', combine='sum'"):
            trimtab.integrations.transformers.register(**other)  # type: ignore[arg-type]
