"""The compiled expert MLPs against the float64 oracle, and what a row's bits may depend on: on that row alone."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import test_expert_mlp as grid
import torch
from torch import Tensor

from helpers.comparing import assert_close, cut
from helpers.threads import torch_threads
from helpers.weights import expert_weights
from trimtab import oracle
from trimtab.errors import InputError
from trimtab.experts import on_cpu
from trimtab.experts.activations import clamped as clamped_word
from trimtab.experts.mlp import expert_mlp
from trimtab.experts.module import ExpertMLP
from trimtab.experts.passes import Pass
from trimtab.experts.plan import plan_experts
from trimtab.experts.weight import GroupedWeight
from trimtab.kernels.choose import get_backend
from trimtab.kernels.compiled import CompiledKernels, compiled_kernels

CPU = torch.device("cpu")


def clamped(pre: Tensor) -> Tensor:
    gate, up = cut(pre[..., ::2], 7.0), cut(pre[..., 1::2], 7.0, -7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def clamped_halves(pre: Tensor) -> Tensor:
    """As transformers' families have it that do not interleave: of an alpha and a shift of its own."""
    gate, up = pre.chunk(2, dim=-1)
    gate, up = cut(gate, 1.5), cut(up, 1.5, -1.5)
    return (up + 0.5) * gate * torch.sigmoid(1.3 * gate)


def tanh_geglu(pre: Tensor) -> Tensor:
    gate, up = pre.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


BUILT_IN = {
    "swiglu": grid.Variant("swiglu", oracle.swiglu, 2),
    "clamped_swiglu": grid.Variant(clamped_word(1.702, 7.0, 1.0, interleaved=True), clamped, 2),
    "clamped_halves": grid.Variant(clamped_word(1.3, 1.5, 0.5, interleaved=False), clamped_halves, 2),
    "relu_squared": grid.Variant("relu_squared", grid.relu_squared, 1),
    "gelu": grid.Variant("gelu", torch.nn.functional.gelu, 1),
    "tanh_geglu": grid.Variant("geglu_tanh", tanh_geglu, 2),
    "geglu": grid.Variant(
        "geglu", lambda p: torch.nn.functional.gelu(p.chunk(2, -1)[0]) * p.chunk(2, -1)[1], 2
    ),
}  # fmt: skip


def go_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As experts do that C++ does not cover as a whole."""
    monkeypatch.setattr(on_cpu, "covers", lambda p: False)


def a_pass(activation: str = "swiglu", dtype: torch.dtype = torch.float32) -> Pass:
    up, down = torch.zeros(2, 8, 4, dtype=dtype), torch.zeros(2, 4, 4, dtype=dtype)
    plan, x = plan_experts(torch.zeros(1, 1, dtype=torch.int64), 2), torch.zeros(1, 4, dtype=dtype)
    return Pass(x, torch.ones(1, 1), *expert_weights(up, down), activation, plan, compiled_kernels())


@pytest.fixture(autouse=True)
def _built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "VARIANTS", BUILT_IN)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("routing", grid.ROUTINGS)
@pytest.mark.parametrize("variant", BUILT_IN)
@pytest.mark.parametrize(("bias", "transposed"), [(False, False), (True, True), (True, False)])
def test_fused_equals_oracle(dtype: torch.dtype, routing: str, variant: str, bias: bool, transposed: bool) -> None:
    assert on_cpu.covers(a_pass(str(BUILT_IN[variant].ours), dtype))
    grid.check("cpu", dtype, routing, variant, bias, transposed)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("routing", grid.ROUTINGS)
@pytest.mark.parametrize("variant", BUILT_IN)
@pytest.mark.parametrize(("bias", "transposed"), [(False, False), (True, True), (True, False)])
def test_experts_equal_oracle_block_by_block(
    routing: str, variant: str, bias: bool, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_by_blocks(monkeypatch)
    grid.check("cpu", torch.float32, routing, variant, bias, transposed)


def test_rows_beside_many_have_the_bits_that_they_have_alone() -> None:
    torch.manual_seed(0)
    module = ExpertMLP(2, 128, 4096, kernels="cpu", dtype=torch.float32)
    x, w, dy = torch.randn(1700, 128), torch.rand(1700, 1), torch.randn(1700, 128)
    found = []
    for rows in (40, 300, 1700):
        for threads in (1, 2):
            leaves = [x[:rows].clone().requires_grad_(), w[:rows].clone().requires_grad_()]
            with torch_threads(threads):
                y = module(leaves[0], (torch.arange(rows) >= 40).long()[:, None], leaves[1])
                y.backward(dy[:rows])
            found.append([t[:40].detach() for t in (y, leaves[0].grad, leaves[1].grad) if t is not None])
    assert all(torch.equal(a, b) for others in found[1:] for a, b in zip(others, found[0], strict=True))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_norm_behind_experts_goes_block_by_block(dtype: torch.dtype, bias: bool) -> None:
    grid.check("cpu", dtype, "random", "swiglu", bias, False, norm=True)


def test_gradients_block_by_block_are_the_loop_s_also_if_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    go_by_blocks(monkeypatch)
    torch.manual_seed(0)
    made = [
        ExpertMLP(4, 24, 20, bias=True, kernels=kernels, dtype=torch.float32, delay_wgrad=delay)
        for kernels, delay in (("torch", False), ("cpu", False), ("cpu", True))
    ]
    x, dy = torch.randn(2, 30, 24)
    ids, w = torch.randint(-1, 3, (30, 2)), torch.rand(30, 2)
    found = []
    for module in made:
        module.load_state_dict(made[0].state_dict())
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        module(leaves[0], ids, leaves[1]).backward(dy)
        module.backward_dw()
        found.append([t.grad for t in (*leaves, *module.parameters())])
    for ours in found[1:]:
        for a, b in zip(ours, found[0], strict=True):
            assert_close(a, b.double(), 2e-6, "gradient")
    assert all(torch.equal(a, b) for a, b in zip(found[1], found[2], strict=True))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("alignment", [1, 8])
def test_no_tokens_and_padded_segments(tokens: int, alignment: int) -> None:
    grid.check("cpu", torch.float32, "random", "swiglu", True, False, tokens=tokens, alignment=alignment)


@pytest.mark.parametrize("hidden", [273, 280, 560])
def test_transposed_gradients_take_as_many_hidden_values_at_once_as_any(
    hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "F", hidden)
    grid.check("cpu", torch.float32, "random", "swiglu", False, True)


def test_what_is_covered_and_what_goes_the_loop_s_way() -> None:
    def differs(**fields: Any) -> Pass:
        p = a_pass()
        for name, value in fields.items():
            setattr(p, name, value)
        return p

    assert on_cpu.covers(a_pass())
    assert not on_cpu.covers(a_pass(dtype=torch.float64))
    assert not on_cpu.covers(a_pass(dtype=torch.float16))
    assert not on_cpu.covers(differs(kernels=get_backend("torch", CPU)))
    assert not on_cpu.covers(differs(up=GroupedWeight(values=(torch.zeros(2, 4, 8).transpose(1, 2),))))
    assert not on_cpu.covers(differs(up=GroupedWeight(values=(torch.zeros(8, 4), torch.zeros(8, 4)))))
    assert not on_cpu.covers(differs(word="tanh"))


E, K = 4, 2


def run(rows: Tensor, threads: int, dtype: torch.dtype, D: int = 80, F: int = 48) -> dict[str, Tensor]:
    """Output and gradients of the rows numbered `rows`, each drawn by its number."""
    g = torch.Generator().manual_seed(1)
    up, down = ((torch.randn(*s, generator=g) * 0.2).to(dtype).requires_grad_() for s in ((E, 2 * F, D), (E, D, F)))
    drawn = torch.randn(1500, 2 * D + K, generator=g)[rows]
    x, dy = (t.to(dtype) for t in (drawn[:, :D], drawn[:, D : 2 * D]))
    w = drawn[:, 2 * D :].clone().requires_grad_()
    x.requires_grad_()
    ids = torch.stack((rows % 3, (rows % 3) + 1), 1)
    ids = torch.where(rows[:, None] < 1400, ids, 3)  # the last hundred make one expert hot
    with torch_threads(threads):
        plan = plan_experts(ids, E)
        y = expert_mlp(x, w, plan, *expert_weights(up=up, down=down), "swiglu", get_backend("cpu", CPU))
        dx, dw, d_up, d_down = torch.autograd.grad(y, (x, w, up, down), dy)
    return {"y": y.detach(), "dx": dx, "dw": dw, "d_up": d_up, "d_down": d_down}


@pytest.mark.parametrize(("dim", "hidden"), [(80, 48), (300, 1100), (96, 64), (416, 288)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_s_bits_depend_on_that_row_alone(dtype: torch.dtype, dim: int, hidden: int) -> None:
    """Expert rows from one to many: of few the weights are read where they lie, if widths are multiples of 32."""
    everything = run(torch.arange(1500), 1, dtype, dim, hidden)
    few = [torch.arange(700 - n // 2, 700 + n // 2 + 1) for n in (2, 6, 12, 14, 22, 24, 44, 48, 70, 90, 100)]
    for rows in (torch.tensor([700]), torch.arange(693, 708), torch.arange(600, 780), torch.arange(200, 1200), *few):
        at = rows.tolist().index(700)
        part = run(rows, 1 + len(rows) % 2, dtype, dim, hidden)
        for name in ("y", "dx", "dw"):
            assert torch.equal(part[name][at], everything[name][700]), f"{name} of row 700 among {len(rows)}"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_small_number_of_rows_has_the_bits_of_many(dtype: torch.dtype, transposed: bool) -> None:
    torch.manual_seed(0)
    up, down = torch.randn(1, 128, 416).to(dtype), torch.randn(1, 416, 64).to(dtype)
    weights = [t.mT.contiguous() if transposed else t for t in (up, down)]
    x, w, dy = torch.randn(200, 416).to(dtype), torch.rand(200, 1), torch.randn(200, 416).to(dtype)

    def results(rows: int) -> list[Tensor]:
        leaves = [x[:rows].clone().requires_grad_(), w[:rows].clone().requires_grad_()]
        y = expert_mlp(
            *leaves, plan_experts(torch.zeros(rows, 1, dtype=torch.int64), 1),
            *expert_weights(up=weights[0], down=weights[1], transposed=transposed), "swiglu",
            get_backend("cpu", CPU),
        )  # fmt: skip
        return [y.detach(), *torch.autograd.grad(y, leaves, dy[:rows])]

    many = results(200)
    for rows in range(1, 70):
        same = [torch.equal(few, all_[:rows]) for few, all_ in zip(results(rows), many, strict=True)]
        assert same == [True] * 3, rows


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", ["swiglu", "clamped_swiglu", "gelu"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "dim", "hidden"), [(7, 64, 96), (30, 416, 32), (80, 32, 544), (60, 3104, 64)])
def test_few_rows_equal_oracle(
    rows: int, dim: int, hidden: int, transposed: bool, variant: str, dtype: torch.dtype, threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of weights that are read where they lie, and, the last ones, where their rows find no room together."""
    monkeypatch.setattr(grid, "D", dim)
    monkeypatch.setattr(grid, "F", hidden)
    bound = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    with torch_threads(threads):
        grid.check("cpu", dtype, "dropped", variant, False, transposed, tokens=rows, bound=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_bit_depends_on_the_number_of_threads(dtype: torch.dtype) -> None:
    one = run(torch.arange(1500), 1, dtype)
    for threads in (2, 3, 8):
        many = run(torch.arange(1500), threads, dtype)
        assert all(torch.equal(one[name], many[name]) for name in one)


def test_a_row_s_bits_in_large_experts_depend_on_neither_the_other_rows_nor_the_threads() -> None:
    dim, hidden = 1024, 1040
    everything = run(torch.arange(1500), 1, torch.float32, dim, hidden)
    for rows in (torch.tensor([700]), torch.arange(690, 714), torch.arange(650, 800), torch.arange(200, 1500)):
        at = rows.tolist().index(700)
        for threads in (1, 2):
            part = run(rows, threads, torch.float32, dim, hidden)
            for name in ("y", "dx", "dw"):
                same = torch.equal(part[name][at], everything[name][700])
                assert same, f"{name} of row 700 among {len(rows)}, {threads} threads"


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mode", ["off", "accumulate", "overwrite"])
@pytest.mark.parametrize("main", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_gradients_go_where_they_are_wanted(delayed: bool, bias: bool, mode: str, main: torch.dtype) -> None:
    """As with kernels "torch", up to rounding: in the parameter, or in a main_grad of any dtype and strides."""
    torch.manual_seed(0)
    fused = ExpertMLP(5, 32, 24, bias=bias, dtype=torch.bfloat16, main_grad=mode, delay_wgrad=delayed)  # type: ignore[arg-type]
    looped = copy.deepcopy(fused)
    looped.kernels = type(fused.kernels)("torch")
    x, dy = torch.randn(2, 40, 32).bfloat16()
    ids, w = torch.randint(-1, 4, (40, 2)), torch.rand(40, 2)
    for module in (fused, looped):
        for p in module.parameters():
            p.main_grad = torch.full(p.shape, 2.0).to(main)
        module.down.main_grad = module.down.main_grad.transpose(1, 2).contiguous().transpose(1, 2)
        module(x, ids, w).backward(dy)
        module.backward_dw()
    assert fused.kernels.reports[0].kernels == "cpu"
    for (name, ours), theirs in zip(fused.named_parameters(), looped.parameters(), strict=True):
        plain = mode == "off" or "bias" in name
        a, b = (p.grad if plain else p.main_grad for p in (ours, theirs))
        assert a.dtype == (torch.bfloat16 if plain else main)
        assert_close(a, b.double(), 2e-2, name)
        assert ours.grad.shape == ours.shape


def test_frozen_parameters_and_rows() -> None:
    full = ExpertMLP(3, 32, 16, bias=True)
    x, ids, w = torch.randn(9, 32), torch.randint(0, 3, (9, 2)), torch.rand(9, 2)
    everything = [("x", x), ("w", w), *full.named_parameters()]

    def gradients(frozen: str) -> dict[str, Tensor | None]:
        module = copy.deepcopy(full)
        leaf = {"x": x.clone().requires_grad_(), "w": w.clone().requires_grad_(), **dict(module.named_parameters())}
        if frozen:
            leaf[frozen].requires_grad_(False)
        module(leaf["x"], ids, leaf["w"]).square().sum().backward()
        return {name: t.grad for name, t in leaf.items()}

    truth = gradients("")
    for frozen, _ in everything:
        for name, grad in gradients(frozen).items():
            assert grad is None if name == frozen else torch.equal(grad, truth[name])


def test_results_may_be_changed_in_place_and_gradients_are_not_copied() -> None:
    module = ExpertMLP(4, 256, 128)  # no other tensor of the call is as large as up's gradient
    x, ids, w = torch.randn(600, 256, requires_grad=True), torch.randint(0, 4, (600, 2)), torch.rand(600, 2)
    y = module(x, ids, w)
    y += 1
    y.sum().backward()
    where = module.gate_up.grad.data_ptr()
    module.zero_grad(set_to_none=True)
    module(x, ids, w).sum().backward()
    assert module.gate_up.grad.data_ptr() == where  # the same pages, handed out again


def test_copies_share_the_kernels() -> None:
    module = ExpertMLP(2, 16, 16)
    module(torch.randn(3, 16), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    kernels = module.kernels.on(CPU, torch.float32)
    assert kernels.name == "cpu"
    assert copy.deepcopy(module).kernels.on(CPU, torch.float32) is kernels
    assert pickle.loads(pickle.dumps(kernels)) is kernels
    others = CompiledKernels(products="widened")
    for copied in (copy.deepcopy(others), pickle.loads(pickle.dumps(others))):
        assert copied.bf16.name == "widened"


def test_shapes_that_do_not_fit_are_refused() -> None:
    ids, w = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    for x, up, down in (
        (torch.ones(3, 4), torch.ones(2, 16, 8), torch.ones(2, 8, 8)),
        (torch.ones(3, 8), torch.ones(2, 8, 8), torch.ones(2, 8, 8)),
    ):
        weights = expert_weights(up=up, down=down)
        with pytest.raises(InputError, match="do not fit together"):
            expert_mlp(x, w, plan_experts(ids, 2), *weights, "swiglu", compiled_kernels())
