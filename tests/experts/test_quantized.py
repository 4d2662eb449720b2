"""Codes in place of the experts' weights: decoded as the reference codecs decode them, bit for bit; outputs and
gradients of experts with them, adapters on top, against the dense experts of the decoded weights in float64."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from helpers.weights import expert_weights
from trimtab import oracle
from trimtab.errors import ConfigError
from trimtab.experts.mlp import expert_mlp
from trimtab.experts.module import ExpertMLP
from trimtab.experts.plan import plan_experts
from trimtab.experts.quantized import FORMATS, decoded, quantized, scales_of
from trimtab.experts.weight import LoraFactors
from trimtab.kernels.choose import KernelChoice

BOUNDS = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 3e-2}


def drawn(name: str, shape: tuple[int, int, int], g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Codes and scales of weights [e, out, in] of about 1 / sqrt(in)."""
    wide = torch.randn(shape, generator=g) / shape[-1] ** 0.5
    if FORMATS[name].quantize:
        return quantized(wide, name)
    e, outs, ins = shape
    codes = torch.randint(0, 256, (e, outs, ins // FORMATS[name].per_byte), generator=g, dtype=torch.uint8)
    if name == "mxfp4":
        return codes, torch.randint(121, 124, scales_of(codes, name), generator=g, dtype=torch.uint8)
    codes = wide.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, torch.rand(scales_of(codes, name), generator=g) + 0.5


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def weights_by_rule() -> Tensor:
    """Weights [3, 40, 128] that need no generator, a block of zeros among them."""
    n = torch.arange(3 * 40 * 128)
    weight = ((n * 2654435761 % 65521).float() / 65521 - 0.5).mul_(1 + n % 7).view(3, 40, 128)
    weight[0, 0, :64] = 0
    return weight


def digest(*tensors: Tensor) -> str:
    made = hashlib.sha256()
    for t in tensors:
        made.update(t.contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()[:16]


BITSANDBYTES = {
    torch.float32: "340c041eacc215fc",
    torch.bfloat16: "3423f6551bc70305",
    torch.float16: "8f867363beb5e79a",
}
"""Of codes, scales and what they decode to, as bitsandbytes 0.50.2 makes them on the CPU of `weights_by_rule`."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_has_the_bits_of_bitsandbytes(dtype: torch.dtype) -> None:
    codes, scales = quantized(weights_by_rule().to(dtype), "nf4")
    assert digest(codes, scales, decoded(codes, scales, "nf4", dtype)) == BITSANDBYTES[dtype]


def test_int8_has_the_bits_of_bitsandbytes() -> None:
    codes, scales = quantized(weights_by_rule().half(), "int8")
    assert digest(codes, scales, decoded(codes, scales, "int8", torch.float32)) == BITSANDBYTES[torch.float16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_reads_the_same_bits(dtype: torch.dtype) -> None:
    pytest.importorskip("transformers")
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    g = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (2, 40, 3, 16), generator=g, dtype=torch.uint8)
    scales = torch.randint(0, 255, (2, 40, 3), generator=g, dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert same_bits(decoded(blocks.flatten(2), scales, "mxfp4", dtype).transpose(1, 2), theirs)
    codes, grid = drawn("fp8", (2, 256, 384), g)
    theirs = Fp8Dequantize(None)._dequantize_one(codes.view(torch.float8_e4m3fn), grid, dtype)
    assert same_bits(decoded(codes, grid, "fp8", dtype), theirs)


def test_blocks_of_codes_by_hand() -> None:
    """Where no reference is there to be asked: which half of a byte comes first, and what a scale counts for."""
    byte = torch.tensor([[[0x07, 0xF0]]], dtype=torch.uint8)
    assert decoded(byte, torch.full((1, 1, 1), 0.5), "nf4", torch.float32).tolist() == [[[-0.5, 0.0, 0.5, -0.5]]]
    of_8 = torch.full((1, 1, 1), 130, dtype=torch.uint8)
    assert decoded(byte, of_8, "mxfp4", torch.float32).tolist() == [[[48.0, 0.0, 0.0, -48.0]]]
    assert decoded(byte, torch.full((1, 1, 1), 127.0), "int8", torch.bfloat16).tolist() == [[[7.0, -16.0]]]


def test_blocks_of_fp8_may_be_cut_at_the_end() -> None:
    codes, scales = drawn("fp8", (2, 200, 160), torch.Generator().manual_seed(4))
    assert scales.shape == (2, 2, 2)
    wide = decoded(codes, scales, "fp8", torch.float32)
    assert wide[1, 199, 150] == codes.view(torch.float8_e4m3fn)[1, 199, 150].float() * scales[1, 1, 1]


@pytest.mark.parametrize(
    ("name", "ins", "says"),
    [("nf4", 96, "multiple"), ("fp8", 128, "can be quantized"), ("nf5", 64, "can be quantized")],
)
def test_refused_to_quantize(name: str, ins: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        quantized(torch.ones(1, 4, ins), name)


@dataclass(frozen=True, kw_only=True)
class Case:
    experts: int = 6
    dim: int = 128
    hidden: int = 192
    tokens: int = 37
    rank: int = 0
    activation: str = "swiglu"
    bias: bool = False
    kept: float = 0.9


CASES = {
    "plain": Case(),
    "adapters": Case(rank=4),
    "no_gate": Case(activation="relu_squared"),
    "biases": Case(bias=True, rank=4),
    "no_token": Case(kept=0.0),
    "no_row_at_all": Case(tokens=0, rank=4),
    "few_rows": Case(tokens=3),
    "many_rows": Case(tokens=500, experts=3, rank=8),
    "more_than_a_step": Case(dim=448, hidden=320, tokens=64, rank=8),
    "interleaved": Case(activation="clamped_swiglu 1.702 7.0 1.0 1", bias=True),
}


class Made:
    """A case's operands: codes, what they stand for, and what float64 makes of that."""

    def __init__(self, case: Case, name: str, dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(1)
        e, d, f, t = case.experts, case.dim, case.hidden, case.tokens
        i = f if case.activation == "relu_squared" else 2 * f
        (up, up_scales), (down, down_scales) = drawn(name, (e, i, d), g), drawn(name, (e, d, f), g)
        self.case, self.dtype, self.codes = case, dtype, {"up": up, "down": down}
        self.format, self.scales = name, {"up": up_scales, "down": down_scales}
        shapes = {"x": (t, d), "w": (t, 3)}
        if case.rank:
            r = case.rank
            shapes |= {"up_a": (e, r, d), "up_b": (e, i, r), "down_a": (e, r, f), "down_b": (e, d, r)}
        if case.bias:
            shapes |= {"up_bias": (e, i), "down_bias": (e, d)}
        self.given = {k: (torch.randn(s, generator=g) / s[-1] ** 0.5).to(dtype) for k, s in shapes.items()}
        ids = torch.randint(0, e - 1, (t, 3), generator=g)
        self.ids = ids.masked_fill(torch.rand(ids.shape, generator=g) >= case.kept, -1)
        self.dy = torch.randn(t, d, generator=g).to(dtype)

    @property
    def kind(self) -> dict[str, Any]:
        """What `codes` are, for `expert_weights`."""
        scales = (self.scales["up"], self.scales["down"]) if self.format else (None, None)
        return {"format": self.format, "scales": scales, "dtype": self.dtype}

    def run(self, kernels: str, **options: object) -> dict[str, Tensor]:
        t = {name: value.clone().requires_grad_() for name, value in self.given.items()}
        chosen = KernelChoice(kernels).on(torch.device("cpu"), self.dtype)
        lora = {}
        if self.case.rank:
            lora = {n: LoraFactors(a=t[f"{n}_a"], b=t[f"{n}_b"], scale=s) for n, s in (("up", 2.0), ("down", 0.5))}
        weights = expert_weights(
            **self.codes, **self.kind, lora=lora, up_bias=t.get("up_bias"), down_bias=t.get("down_bias")
        )
        plan = plan_experts(self.ids, self.case.experts, kernels=chosen)

        def call(x: Tensor) -> Tensor:
            return expert_mlp(x, t["w"], plan, *weights, options.get("activation", self.case.activation), chosen)  # type: ignore[arg-type]

        y = checkpoint(call, t["x"], use_reentrant=False) if options.get("recompute") else call(t["x"])
        y.backward(self.dy)
        return {"y": y.detach(), **{name: value.grad for name, value in t.items() if value.grad is not None}}

    def truth(self) -> dict[str, Tensor]:
        t = {name: value.double().requires_grad_() for name, value in self.given.items()}
        wide = {
            name: decoded(codes, self.scales[name], self.format, self.dtype).double()
            for name, codes in self.codes.items()
        }
        if self.case.rank:
            for name, scale in (("up", 2.0), ("down", 0.5)):
                wide[name] = wide[name] + scale * t[f"{name}_b"] @ t[f"{name}_a"]
        y = dense(self.case, t, wide, self.ids)
        y.backward(self.dy.double())
        return {"y": y.detach(), **{name: value.grad for name, value in t.items() if value.grad is not None}}


def dense(case: Case, t: dict[str, Tensor], wide: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Every token through every expert, weighted."""
    pre = torch.einsum("td,eid->tei", t["x"], wide["up"])
    if case.bias:
        pre = pre + t["up_bias"]
    if case.activation == "relu_squared":
        h = torch.relu(pre).square()
    elif case.activation == "swiglu":
        h = oracle.swiglu(pre)
    else:
        gate, up = pre[..., ::2].clamp(max=7.0), pre[..., 1::2].clamp(-7.0, 7.0)
        h = (up + 1.0) * gate * torch.sigmoid(1.702 * gate)
    out = torch.einsum("tef,edf->ted", h, wide["down"])
    if case.bias:
        out = out + t["down_bias"]
    weight = torch.zeros(ids.shape[0], case.experts, dtype=out.dtype)
    weight = weight.index_put((torch.arange(ids.shape[0])[:, None].expand_as(ids), ids.clamp(min=0)),
                              t["w"] * (ids >= 0), accumulate=True)  # fmt: skip
    return (out * weight.unsqueeze(-1)).sum(1)


def check(got: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        off = (got[name].double() - value).norm() / value.norm().clamp(min=1e-30)
        assert off <= BOUNDS[dtype], (name, float(off))
        assert got[name].shape == value.shape


RUNS = [
    *((case, name, "cpu") for case in CASES for name in FORMATS),
    *((case, "nf4", "torch") for case in CASES),
    *(("adapters", name, "torch") for name in FORMATS if name != "nf4"),
    *((case, "nf4", "grouped_mm") for case in ("plain", "adapters", "no_token")),
]


@pytest.mark.parametrize(("case", "name", "kernels"), RUNS)
def test_experts_of_codes_are_those_of_what_they_decode_to(case: str, name: str, kernels: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        made = Made(CASES[case], name, dtype)
        check(made.run(kernels), made.truth(), dtype)


@pytest.mark.parametrize("kernels", ["torch", "cpu"])
def test_recompute_and_functions_of_ones_own_change_no_number(kernels: str) -> None:
    made = Made(CASES["biases"], "nf4", torch.float32)
    want = made.truth()
    check(made.run(kernels, recompute=True), want, torch.float32)
    check(made.run(kernels, activation=oracle.swiglu), want, torch.float32)


def test_nothing_decoded_is_saved() -> None:
    made, saved = Made(CASES["adapters"], "nf4", torch.bfloat16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        made.run("torch")
    most = max(t.numel() for t in saved if t.dtype.is_floating_point)
    assert most < made.codes["down"].numel() * 2


def test_flops_are_those_of_the_weights() -> None:
    made = Made(CASES["plain"], "nf4", torch.float32)
    rows = int((made.ids >= 0).sum())
    with FlopCounterMode(display=False) as counter:
        made.run("cpu")
    assert counter.get_total_flops() == 2 * 2 * rows * 128 * (2 * 192 + 192)


def test_codes_take_no_recipe_and_lie_one_way() -> None:
    made = Made(CASES["plain"], "nf4", torch.float32)
    weights = expert_weights(**made.codes, **made.kind, transposed=True)
    plan = plan_experts(made.ids, 6)
    with pytest.raises(ConfigError, match=r"\[e, out, in\]"):
        expert_mlp(made.given["x"], made.given["w"], plan, *weights)


def test_a_module_of_codes_saves_loads_and_trains_what_is_left() -> None:
    torch.manual_seed(0)
    experts = ExpertMLP(4, 128, 64, bias=True)
    whole = {name: p.detach().clone() for name, p in experts.named_parameters()}
    experts.quantize_("nf4")
    assert experts.gate_up.dtype is torch.uint8
    assert {name for name, p in experts.named_parameters() if p.requires_grad} == {"gate_up_bias", "down_bias"}
    other = ExpertMLP(4, 128, 64, bias=True).quantize_("nf4")
    other.load_state_dict(experts.state_dict())
    plain = ExpertMLP(4, 128, 64, bias=True)
    for name, weight in whole.items():
        if not name.endswith("bias"):
            scales = getattr(experts, f"{name}_scales")
            codes = getattr(experts, name)
            rows = decoded(
                codes.view(4, -1, codes.shape[-1]), scales.view(4, -1, scales.shape[-1]), "nf4", torch.float32
            )
            getattr(plain, name).data.copy_(rows.view_as(weight))
        else:
            getattr(plain, name).data.copy_(weight)
    x, w, ids = torch.randn(9, 128), torch.rand(9, 2), torch.randint(0, 4, (9, 2))
    found = []
    for module in (experts, other, plain, torch.compile(experts, backend="aot_eager", fullgraph=True)):
        x = x.detach().requires_grad_()
        y = module(x, ids, w)
        y.sum().backward()
        found.append((y.detach(), x.grad))
    for y, dx in found:
        assert torch.allclose(y, found[2][0], rtol=1e-5, atol=1e-6)
        assert torch.allclose(dx, found[2][1], rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="quantized once"):
        experts.quantize_("nf4")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", list(FORMATS))
def test_cpp_has_the_bits_of_decoded_weights(name: str, threads: int) -> None:
    """That of experts whose weights are what the codes stand for, whichever rows share a product."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            made = Made(Case(tokens=70, dim=160 if name == "int8" else 192, hidden=320, experts=4), name, dtype)
            got = made.run("cpu")
            for key in ("up", "down"):
                made.codes[key] = decoded(made.codes[key], made.scales[key], name, dtype)
            made.format = ""
            want = made.run("cpu")
            assert all(torch.equal(got[key], value) for key, value in want.items())
    finally:
        torch.set_num_threads(before)
