"""What experts must do on a GPU, as functions of the device, for tests/gpu.

Legend: R rows, G groups, A in features, B out features, D model dim, F hidden dim, E experts, K slots per row.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from helpers.comparing import assert_close, gradients
from helpers.pair_truth import linear_truth
from trimtab import oracle
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.module import ExpertMLP
from trimtab.experts.recipes import MXFP8, FP8Rowwise, Recipe
from trimtab.experts.weight_grad import MainGradMode
from trimtab.kernels.choose import KernelChoice
from trimtab.parallel.grad_norm import clip_grad_norm_

G, A, B = 4, 256, 128  # what every recipe's hardware takes
E, D, F, K = 4, 256, 128, 2
BOUNDS = {torch.float32: 5e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}  # float32: TF32 may be on
SIZES = ([3, 0, 140, 1], [0, 0, 0, 0], [0, 200, 0, 0], [0, 0, 0, 5])
HARDWARE: dict[str, Recipe] = {"fp8_rowwise": FP8Rowwise(backend="auto"), "mxfp8": MXFP8(backend="auto")}


@dataclass(frozen=True, kw_only=True)
class LinearCase:
    """One call of GroupedLinear. form: where the sizes are. tail: rows behind the last segment, which hold NaN."""

    device: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    form: str = "device"
    tail: int = 0
    single: bool = True
    main_grad: MainGradMode = "off"
    delayed: bool = False
    recipe: Recipe | None = None
    kernels: str = "auto"


def group_sizes(case: LinearCase) -> list[int] | Tensor:
    sizes = list(case.sizes)
    where = case.device if case.form == "device" else "cpu"
    return sizes if case.form == "list" else torch.tensor(sizes, dtype=torch.int32, device=where)


def linear(case: LinearCase) -> tuple[GroupedLinear, Tensor, Tensor]:
    """The layer over stale main_grads, its rows and the gradient of its output."""
    torch.manual_seed(0)
    layer = GroupedLinear(
        G, A, B, dtype=case.dtype, single_parameter=case.single, main_grad=case.main_grad, delay_wgrad=case.delayed,
        recipe=case.recipe, kernels=KernelChoice(case.kernels),
    )  # fmt: skip
    layer.to(case.device)
    used = sum(case.sizes)
    g = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(used + case.tail, n, generator=g).to(case.dtype) for n in (A, B))
    x[used:] = dy[used:] = torch.nan
    for param in layer.weights:
        param.main_grad = torch.full_like(param, 3.0, dtype=torch.float32)
    return layer, x.to(case.device).requires_grad_(), dy.to(case.device)


def run(case: LinearCase) -> dict[str, Tensor]:
    """Output and every gradient of one call, on the CPU; per group what is per group."""
    layer, x, dy = linear(case)
    y = layer(x, group_sizes(case))
    y.backward(dy)
    layer.backward_dw()
    fused = case.main_grad != "off"
    assert all(p.grad is not None and p.grad.shape == p.shape and p.grad.dtype == p.dtype for p in layer.parameters())
    where = [p.main_grad if fused else p.grad for p in layer.weights]
    dw = where[0] if case.single else torch.stack(where)
    db = layer.biases[0].grad if case.single else torch.stack([p.grad for p in layer.biases])
    return {name: t.detach().cpu() for name, t in (("y", y), ("dx", x.grad), ("dw", dw), ("db", db))}


def linear_is_true(case: LinearCase) -> None:
    """Against float64 on the host."""
    layer, x, dy = linear(case)
    weight = layer.weights[0] if case.single else torch.stack(layer.weights)
    bias = layer.biases[0] if case.single else torch.stack(layer.biases)
    y, dx, dw, db = linear_truth(x.cpu(), weight.cpu(), bias.cpu(), dy.cpu(), list(case.sizes))
    stale = 3.0 if case.main_grad == "accumulate" else 0.0
    wanted = {"y": y, "dx": dx, "dw": dw + stale, "db": db}
    for name, value in run(case).items():
        assert_close(value, wanted[name], BOUNDS[case.dtype], f"{case}: {name}")


def hardware_is_emulation(case: LinearCase) -> None:
    """A recipe on its own kernels, or whatever it takes on this device, against the same recipe emulated."""
    assert isinstance(case.recipe, Recipe)
    emulated = replace(case, recipe=replace(case.recipe, backend="emulated"), device="cpu", form="list")
    wanted = run(emulated)
    for name, value in run(case).items():
        assert_close(value, wanted[name], 2e-2, f"{case}: {name}")


def clipped_by_one_factor(device: str, dtype: torch.dtype, scale: float) -> None:
    """Gradients of `dtype` and of float32, each rounded once."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.zeros(4_000, dtype=each, device=device)) for each in (dtype, torch.float32)]
    drawn = [(scale * torch.randn_like(p)).detach() for p in params]
    for p, g in zip(params, drawn, strict=True):
        p.grad = g.clone()
    assert clip_grad_norm_(params, 1.0) > 1
    true = [g.double() / torch.cat([d.double() for d in drawn]).norm() for g in drawn]
    for p, want in zip(params, true, strict=True):
        assert p.grad is not None
        bound = max(torch.finfo(p.dtype).eps / 2, 2e-7)
        torch.testing.assert_close(p.grad.double(), want, rtol=bound, atol=torch.finfo(torch.float16).tiny / 1024)


def mlp(device: str, recipe: Recipe | None = None) -> ExpertMLP:
    torch.manual_seed(0)
    return ExpertMLP(E, D, F, dtype=torch.bfloat16, bias=True, recipe=recipe).to(device)


def mlp_inputs(device: str, tokens: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, ids (the last expert is empty, some slots are dropped) and routing weights."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, D, generator=g).bfloat16()
    ids, w = torch.randint(-1, E - 1, (tokens, K), generator=g), torch.rand(tokens, K, generator=g)
    return x.to(device).requires_grad_(), ids.to(device), w.to(device).requires_grad_()


def mlp_is_true(device: str, tokens: int) -> None:
    """Output and every gradient against the oracle."""
    module, (x, ids, w) = mlp(device), mlp_inputs(device, tokens)
    y = module(x, ids, w)
    y.sum().backward()
    host, leaves = copy.deepcopy(module).cpu(), [t.detach().cpu().requires_grad_() for t in (x, w)]
    host.zero_grad()
    true = oracle.moe(
        leaves[0], ids.cpu(), leaves[1], host.gate_up, host.down, up_bias_EI=host.gate_up_bias,
        down_bias_ED=host.down_bias,
    )  # fmt: skip
    names = ["x", "w", *(name for name, _ in host.named_parameters())]
    inputs = [*leaves, *host.parameters()]
    wanted = gradients(true, inputs, torch.ones_like(true))
    got = [x.grad, w.grad, *(p.grad for p in module.parameters())]
    assert_close(y.cpu(), true, 3e-2, "output")
    for name, ours, theirs in zip(names, got, wanted, strict=True):
        assert_close(ours.cpu(), theirs, 3e-2, name)
