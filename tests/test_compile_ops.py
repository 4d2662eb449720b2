"""The operators that stand in a compiled layer: what torch asks of any, and shapes at any count, fake as real."""

from __future__ import annotations

import re
from collections.abc import Callable
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from helpers import house
from helpers.commands import run_python
from helpers.compile_case import inputs
from helpers.layer_case import D, E, K, build, results
from trimtab.dispatch.checks import checked_ids, name_bytes
from trimtab.errors import InputError
from trimtab.experts.activations import activate_backward_op, activate_op, clamped
from trimtab.experts.expert_ops import experts_backward_op, experts_op
from trimtab.experts.plan import plan_op
from trimtab.experts.recipes import MXFP8
from trimtab.experts.weight import GroupedWeight, LoraFactors
from trimtab.kernels import choose
from trimtab.moe import MoE, MoEOutput

F = 4
ALL = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def experts(tokens: int, dtype: torch.dtype, *, bias: bool, drop: float = 0.2, kernels: str = "torch") -> list[Any]:
    """What `experts_op` takes."""
    g = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(dtype).requires_grad_()

    w = torch.rand(tokens, K, generator=g).requires_grad_()
    ids = torch.rand(tokens, E, generator=g).argsort(-1)[:, :K]
    ids = ids.masked_fill(torch.rand(ids.shape, generator=g) < drop, -1).int()
    biases = ((draw(E, 2 * F),), (draw(E, D),)) if bias else ((), ())
    turned = not bias
    values = (draw(E, D, 2 * F), draw(E, F, D)) if turned else (draw(E, 2 * F, D), draw(E, D, F))
    lora = None if bias else LoraFactors(a=draw(E, 8, D), b=draw(E, 2 * F, 8), scale=0.5, dropout=0.25)
    up, down = (
        GroupedWeight(values=(value,), biases=own, transposed=turned, lora=factors)
        for value, own, factors in zip(values, biases, (lora, None), strict=True)
    )
    plan, seed = plan_op(ids, E, ids.numel(), False, "", kernels), None if bias else torch.tensor(7)
    activation = clamped(1.0, 7.0, 0.0, interleaved=False) if turned else "swiglu"
    forms = (activation, up.form, down.form, kernels, True)
    return [draw(tokens, D), w, up.tensors(), down.tensors(), plan, seed, *forms]


@pytest.mark.parametrize(
    ("tokens", "dtype", "bias", "drop"), [(5, torch.float32, True, 0.2), (3, torch.bfloat16, False, 1.1)]
)
def test_experts_pass_opcheck(tokens: int, dtype: torch.dtype, bias: bool, drop: float) -> None:
    """drop above 1: no slot is kept."""
    args = experts(tokens, dtype, bias=bias, drop=drop)
    plain = tree_map_only(Tensor, Tensor.detach, args)
    torch.library.opcheck(experts_op, tuple(plain), test_utils=ALL)
    y, *kept = experts_op(*plain)
    weights = [*plain[2], *plain[3]]
    wanted = [t.shape[1] != 8 or bias for t in weights]  # but one factor
    out = [torch.empty_like(t) for t, want in zip(weights, wanted, strict=True) if want]
    given = (torch.ones_like(y), kept, out, wanted, [False] * len(out), *plain[:-1], True, False)
    torch.library.opcheck(experts_backward_op, given, test_utils=ALL)


def test_the_other_operators_pass_opcheck() -> None:
    name = name_bytes("moe")
    ids, weights = torch.zeros(3, K, dtype=torch.int64), torch.ones(3, K)
    torch.library.opcheck(checked_ids, (ids, weights, name, E), test_utils=ALL)
    torch.library.opcheck(torch.ops.trimtab.replayed.default, ([ids, ids], "ids"), test_utils=ALL)
    torch.library.opcheck(torch.ops.trimtab.top.default, (torch.randn(3, E), K), test_utils=ALL)
    for tokens, activation in ((3, "swiglu"), (0, "gelu")):
        pre = torch.randn(tokens, 2 * F)
        torch.library.opcheck(activate_op, (pre, activation), test_utils=ALL)
        dh = torch.randn_like(activate_op(pre, activation))
        torch.library.opcheck(activate_backward_op, (pre, dh, activation), test_utils=ALL)
    torch.library.opcheck(plan_op, (ids, E, 3 * K, True, "", "torch"), test_utils=ALL)
    ids[1], weights[2] = E, torch.nan
    with pytest.raises(InputError, match=rf"layer moe.*{2 * K} slot.*token\(s\) 1, 2"):
        checked_ids(ids, weights, name, E)


def test_experts_keep_nothing_without_a_backward() -> None:
    args = experts(5, torch.float32, bias=True)
    with torch.no_grad():
        y, pre = experts_op(*args)
        assert pre.shape == (5 * K, 2 * F)
        (other,) = experts_op(*args[:-1], False)
    assert torch.equal(y, other)


def test_kernels_are_chosen_on_the_device_and_for_the_shape_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two GPUs that this machine need not have: which one is current where the kernels are tested, and who asks."""
    current, asked = [0], []

    class Current:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            current.append(self.device.index)

        def __exit__(self, *_: object) -> None:
            current.pop()

    class Choice:
        def __init__(self, first: str, fallback: list[str]) -> None:
            self.names = (first, *fallback)

        def on(self, device: torch.device, dtype: torch.dtype) -> object:
            asked.append((self.names, device.index, current[-1], dtype, torch.is_grad_enabled()))
            return object()

    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(choose, "KernelChoice", Choice)
    bf16 = torch.bfloat16
    with torch.no_grad():
        found = [choose._chosen("triton,grouped_mm", torch.device("cuda", gpu), bf16) for gpu in (1, 1, 0)]
    assert found[0] is found[1]
    assert len({id(kernels) for kernels in found}) == 2
    names = ("triton", "grouped_mm")
    assert asked == [(names, gpu, gpu, bf16, True) for gpu in (1, 0)]
    choose._chosen.cache_clear()


def traced(moe: MoE) -> Callable[..., MoEOutput]:
    """The layer as dynamo's graph, run on whatever tensors come: on fake ones only shapes are made."""
    return torch.compile(moe, backend="eager", fullgraph=True)


@pytest.mark.parametrize(("combine", "dtype"), [("sum", torch.bfloat16), ("ordered", torch.float32)], ids=str)
def test_fake_shapes_are_the_real_ones(combine: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    config: dict[str, Any] = {"router": {"aux_loss": 0.1, "capacity_factor": 0.6}, "bias": True}
    moe = build(dtype, combine=combine, shared_hidden=6, **config)
    for tokens in (0, 5):
        given = inputs((tokens,), dtype)
        real = results(moe, moe, given)
        fake_moe = build(dtype, combine=combine, shared_hidden=6, **config)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            for module in fake_moe.modules():
                for name, p in module.named_parameters(recurse=False):
                    module._parameters[name] = torch.nn.Parameter(mode.from_tensor(p.detach()))
            x = mode.from_tensor(given[0]).requires_grad_()
            out = traced(fake_moe)(x)
            (out.y.float().sum() + out.losses["aux"]).backward()
        found = {"y": out.y, "dx": x.grad, "loads": out.loads_E, "ids": out.ids_TK} | out.losses
        found |= {name: p.grad for name, p in fake_moe.named_parameters()}
        shapes = {name: (tuple(t.shape), t.dtype, t.stride()) for name, t in found.items()}
        assert shapes == {name: (tuple(real[name].shape), real[name].dtype, real[name].stride()) for name in found}


def test_what_no_graph_can_hold_is_not_exported() -> None:
    """torch's own words are for strict export alone; the other one went in circles."""
    x = torch.randn(3, D)
    for options in ({"recipe": MXFP8(backend="emulated")}, {"delay_wgrad": True}, {"main_grad": "accumulate"}):
        with pytest.raises(InputError, match=r"cannot be exported: .* an option has state"):
            torch.export.export(build(**options), (x,), strict=False)
    torch.export.export(build(), (x,), strict=False)


@pytest.mark.parametrize(
    "router", [{"capacity_factor": 1.1}, {"select": "expert_choice", "capacity_factor": 0.6, "aux_loss": 0.1}], ids=str
)
def test_an_exported_layer_is_saved_and_loaded_for_any_number_of_tokens(router: dict[str, Any]) -> None:
    """Made where an expert takes one token alone."""
    moe, rows = build(router=router).eval(), ({0: torch.export.Dim.DYNAMIC},)
    x = torch.randn(7, D)
    assert torch.equal(torch.export.export(moe, (x,), strict=True).module()(x).y, moe(x).y)
    for module in (moe, moe.router):
        file = BytesIO()
        torch.export.save(torch.export.export(module, (torch.randn(3, D),), dynamic_shapes=rows, strict=False), file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        for tokens in (2, 3, 10, 77):
            x = torch.randn(tokens, D)
            found, true = loaded(x), module(x)
            assert type(found) is type(true)
            for name in ("loads_E", "ids_TK", "y" if module is moe else "weights_TK"):
                assert torch.equal(getattr(found, name), getattr(true, name)), (tokens, name)


def test_who_loads_what_was_exported_knows_every_operator() -> None:
    root = house.PACKAGE
    here = re.compile(r"library\.custom_op|library\.Library|^\w+ = operator\(", re.M)
    files = [file.relative_to(root) for file in root.rglob("*.py") if here.search(file.read_text())]
    files = [file for file in files if file.parts[0] != "integrations"]
    modules = {".".join(("trimtab", *file.with_suffix("").parts)) for file in files}
    code = "import sys, trimtab.moe, trimtab.experts.linear; print(*sys.modules)"
    known = run_python("-c", code, check=True).stdout.split()
    assert len(modules) >= 4
    assert modules <= {*known}


class Result(torch.nn.Module):
    """What a layer and its router give, without the rest."""

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.moe(x).y, self.moe.router(x).logits_TE


def test_what_a_strict_export_saves_is_loaded_and_has_its_logits_in_float32_under_autocast() -> None:
    module, x, file = Result(build().eval()), torch.randn(5, D), BytesIO()
    torch.export.save(torch.export.export(module, (x,), strict=True), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    y, logits = module(x)
    found = loaded(x)
    assert torch.equal(found[0], y)
    assert torch.equal(found[1], logits)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(loaded(x)[1], logits)
