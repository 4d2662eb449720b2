"""Codes in place of the experts' weights: decoded bit for bit as the reference codecs decode them; what experts of
them keep and cost. Outputs and gradients are in the grid of pairs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import CheckpointException
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from helpers.pairs import Pair, Subject
from trimtab.errors import ConfigError
from trimtab.experts.module import ExpertMLP
from trimtab.experts.quantized import FORMATS, HUGE, _pairs, decoded, every_code, in_huge_pages, quantized, scales_of
from trimtab.kernels.compiled import CODES
from trimtab.plan.without_values import WithoutValues


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
    torch.float32: "340c041eacc215fc", torch.bfloat16: "3423f6551bc70305", torch.float16: "8f867363beb5e79a",
}  # fmt: skip
"""Of codes, scales and what they decode to, as bitsandbytes 0.50.2 makes them on the CPU of `weights_by_rule`."""


@pytest.mark.parametrize("dtype", BITSANDBYTES)
def test_nf4_and_int8_have_the_bits_of_bitsandbytes(dtype: torch.dtype) -> None:
    name, to = ("int8", torch.float32) if dtype is torch.float16 else ("nf4", dtype)
    codes, scales = quantized(weights_by_rule().to(dtype), name)
    assert digest(codes, scales, decoded(codes, scales, name, to)) == BITSANDBYTES[dtype]


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


@pytest.mark.parametrize("entries", [0, 7, HUGE, 3 * HUGE + 5])
def test_whole_huge_pages_are_asked_for_and_keep_what_they_hold(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, asked = torch.arange(entries).to(torch.uint8)[2:], list[Any]()
    before, begin, end = tensor.clone(), tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    in_huge_pages(tensor)
    assert torch.equal(tensor, before)
    monkeypatch.setattr("trimtab.experts.quantized.sys", SimpleNamespace(platform="linux"))
    fake = SimpleNamespace(madvise=lambda at, size, advice: asked.append((at.value, size.value, advice)))
    monkeypatch.setattr("ctypes.CDLL", lambda _: fake)
    in_huge_pages(tensor)
    in_huge_pages(torch.empty(HUGE, device="meta"))
    with FakeTensorMode():
        in_huge_pages(torch.empty(HUGE))
    whole = range(-(-begin // HUGE) * HUGE, end // HUGE * HUGE)
    assert asked == [(whole.start, len(whole), 25)] * bool(whole), "MADV_COLLAPSE of the pages that it fills"
    asked.clear()
    codes = ExpertMLP(1, 1024, 1024).quantize_("packed").down
    assert any(codes.data_ptr() <= at < at + size <= codes.data_ptr() + codes.nbytes for at, size, _ in asked)


@pytest.mark.parametrize("name", ["nf4", "mxfp4"])
def test_codes_mean_the_same_after_a_run_without_values(name: str) -> None:
    codes, scales, weight = every_code(name, (1, 8, 64), torch.float32)
    _pairs.cache_clear()  # as in a process whose first codes these are
    with WithoutValues():
        decoded(*(torch.empty_like(t) for t in (codes, scales)), name, torch.float32)
    assert torch.equal(decoded(codes, scales, name, torch.float32), weight)


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


@pytest.mark.parametrize(("name", "ins", "says"), [
    ("nf4", 96, "multiple"), ("fp8", 128, "can be quantized"), ("nf5", 64, "can be quantized"),
    ("packed", 64, "packed has blocks of 32 outputs, and a weight has 4, no multiple"),
    ("packed_pairs", 64, "can be quantized"),
])  # fmt: skip
def test_refused_to_quantize(name: str, ins: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        quantized(torch.ones(1, 2, 4, ins), name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_what_is_not_packed_is_left_whole(dtype: torch.dtype) -> None:
    experts = ExpertMLP(2, 64, 32, dtype=dtype)
    with pytest.raises(ConfigError, match=f"packed holds weights in float32 or bfloat16, and a weight is in {dtype}"):
        experts.quantize_("packed")
    assert experts.codes is None
    assert experts.gate_up.requires_grad


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "word"), [(torch.float32, 1), (torch.bfloat16, 2)])
def test_packed_are_the_weights_panel_by_panel(dtype: torch.dtype, word: int, transposed: bool) -> None:
    """Without loss: every bit pattern comes back, NaN's too; whichever way the weights lie."""
    bits = torch.arange(3 * 64 * 64, dtype=torch.int32) * 1103515245
    weight = bits.view(dtype)[: 3 * 64 * 64].view(3, 64, 64)
    codes, scales = quantized(weight.mT.contiguous().mT if transposed else weight, "packed")
    assert (codes.shape, codes.dtype, scales.tolist()) == ((3, 2 * word, 2048 // word), dtype, [[[1.0], [1.0]]] * 3)
    panels = codes.view(3, 2, 64 // word, 32, word)
    for panel in range(2):
        rows = weight[:, 32 * panel : 32 * panel + 32].reshape(3, 32, 64 // word, word)
        assert same_bits(panels[:, panel], rows.transpose(1, 2))
    assert same_bits(decoded(codes, scales, "packed", dtype), weight)
    turned = weight.view(3, 32, 2, 64).transpose(1, 2).reshape(weight.shape)  # gates before ups
    pairs, _ = quantized(weight, "packed_pairs")
    assert pairs.shape == (3, word, 4096 // word)
    assert same_bits(pairs.view(codes.shape), quantized(turned, "packed")[0])
    assert same_bits(decoded(pairs, scales, "packed_pairs", dtype), weight)


@pytest.mark.parametrize(("change", "says"), [
    (lambda mlp: mlp.bfloat16(), "codes of packed came in torch.bfloat16"),
    (lambda mlp: mlp.down.requires_grad_(), "codes of packed do not train"),
    (lambda mlp: mlp.down_scales.requires_grad_(), "codes of packed do not train"),
])  # fmt: skip
def test_packed_are_neither_cast_nor_trained(change: Callable[[ExpertMLP], object], says: str) -> None:
    experts = ExpertMLP(2, 64, 32).quantize_("packed")
    change(experts)
    with pytest.raises(ConfigError, match=f"ExpertMLP's {says}"):
        experts(torch.ones(3, 64), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))


@pytest.mark.parametrize("kernels", ["torch", "cpu"])
def test_recompute_changes_no_bit(kernels: str) -> None:
    found = []
    for subject in [Subject(Pair(module="mlp", weights="nf4+lora+bias", kernels=kernels)) for _ in range(2)]:
        if found:
            subject.call = partial(checkpoint, subject.call, use_reentrant=False)  # type: ignore[method-assign]
        found.append(subject.run(subject.trained))
    assert all(value is None or torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_nothing_decoded_is_saved() -> None:
    subject, saved = Subject(Pair(module="mlp", weights="nf4+lora", dtype=torch.bfloat16)), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        subject.run(subject.trained)
    most = max(t.numel() for t in saved if t.dtype.is_floating_point)
    assert most < subject.layer.down.numel() * 2


def test_flops_are_those_of_the_weights() -> None:
    subject = Subject(Pair(module="mlp", weights="nf4", kernels="cpu", dim=128, hidden=192))
    with FlopCounterMode(display=False) as counter:
        subject.run(subject.trained)
    assert counter.get_total_flops() == 2 * 2 * len(subject.e_S) * 128 * (2 * 192 + 192)


@pytest.mark.parametrize("name", ["nf4", "packed"])
def test_a_module_of_codes_saves_loads_and_trains_what_is_left(name: str) -> None:
    torch.manual_seed(0)
    experts, other = (ExpertMLP(4, 128, 64, bias=True).quantize_(name) for _ in range(2))
    assert experts.gate_up.dtype is FORMATS[name].dtype_of(torch.float32)
    assert {name for name, p in experts.named_parameters() if p.requires_grad} == {"gate_up_bias", "down_bias"}
    other.load_state_dict(experts.state_dict())
    x, w, ids, found = torch.randn(9, 128), torch.rand(9, 2), torch.randint(0, 4, (9, 2)), []
    for module in (experts, other, torch.compile(experts, backend="aot_eager", fullgraph=True)):
        x = x.detach().requires_grad_()
        y = module(x, ids, w)
        y.sum().backward()
        found.append((y.detach(), x.grad))
    assert all(torch.equal(a, b) for a, b in zip(found[1], found[0], strict=True))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found[2], found[0], strict=True))
    with pytest.raises(ConfigError, match="quantized once"):
        experts.quantize_(name)


LOADERS: dict[str, Callable[[nn.Module, nn.Module, Path], object]] = {
    "strict": lambda module, other, _: module.load_state_dict(other.state_dict()),
    "loose": lambda module, other, _: module.load_state_dict(other.state_dict(), strict=False),
    "assigned": lambda module, other, _: module.load_state_dict(other.state_dict(), strict=False, assign=True),
    "dcp": lambda module, other, to: [dcp.save(other.state_dict(), checkpoint_id=to),
                                      dcp.load(module.state_dict(), checkpoint_id=to)],
    "safetensors": lambda module, other, to: [save_model(other, f"{to}/1"), load_model(module, f"{to}/1", False)],
}  # fmt: skip


@pytest.mark.parametrize("how", LOADERS)
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("other", ["", "int8", "bf16"])
def test_no_loader_takes_panels_for_anything_else(other: str, back: bool, how: str, tmp_path: Path) -> None:
    """Nor anything else for panels: not even those of another dtype, of as many values in another order."""
    saved, module = ExpertMLP(2, 64, 64, dtype=torch.bfloat16 if other == "bf16" else None), ExpertMLP(2, 64, 64)
    saved = saved.quantize_(other.replace("bf16", "packed")) if other else saved
    saved, module = (saved, module.quantize_("packed"))[:: -1 if back else 1]
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises((ConfigError, RuntimeError, CheckpointException), match=r"ize mismatch|came (without|as codes)"):
        LOADERS[how](module, saved, tmp_path)
    for key in ("gate_up", "down"):
        assert same_bits(module.get_parameter(key), before[key])


@pytest.mark.parametrize("how", sorted(LOADERS.keys() - {"dcp"}))  # by which nothing of ours is asked
def test_no_loader_takes_codes_for_weights(how: str, tmp_path: Path) -> None:
    saved, module = ExpertMLP(2, 64, 64).quantize_("int8"), ExpertMLP(2, 64, 64)
    before = module.gate_up.detach().clone()
    with pytest.raises(ConfigError, match=r"gate_up came as codes, not in torch\.float32: quantize"):
        LOADERS[how](module, saved, tmp_path)
    assert same_bits(module.gate_up, before)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", sorted(CODES.keys() - {"packed_pairs"}))  # that of gate and up in turn
def test_cpp_has_the_bits_of_decoded_weights(name: str, threads: int) -> None:
    """That of experts whose weights are what the codes stand for, whichever rows share a product: of scales that leave
    no bf16 but zeros, negative ones and a code of NaN, too."""
    for dtype in (torch.float32, torch.bfloat16):
        dim = 160 if name == "int8" else 192
        pair = Pair(module="mlp", weights=name, kernels="cpu", rows=70, dim=dim, hidden=320, experts=4, dtype=dtype,
                    threads=threads)  # fmt: skip
        coded, plain = Subject(pair), Subject(replace(pair, weights="plain"))
        for key in plain.names:
            codes, scales = (coded.layer.get_parameter(n).data.flatten(1, -2) for n in (key, f"{key}_scales"))
            if name == "mxfp4":
                scales[..., ::4, 1] = torch.tensor([0, 1, 2, 3]).repeat(codes.shape[1])[: codes.shape[1] // 4].byte()
            if name == "fp8":
                scales[:, 1] *= -1
                codes[0, 40, 9] = 127
            param = plain.leaves[key]
            param.data.copy_(decoded(codes, scales, name, dtype).view_as(param))
        for leaf in ("x", "w"):
            plain.leaves[leaf] = coded.leaves[leaf].detach().clone()
        plain.dy, plain.ids = coded.dy, coded.ids
        got, want = (subject.run(["x", "w"]) for subject in (coded, plain))
        assert all(v is None or torch.equal(v.nan_to_num(7), want[k].nan_to_num(7)) for k, v in got.items())
