"""A backward for some of the inputs, as `torch.autograd.grad(y, x)` asks for, does that and no more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from helpers.comparing import assert_close
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.module import ExpertMLP
from trimtab.experts.recipes import FP8Blockwise

M, E, D, F, K = 13, 4, 16, 32, 2
BIASED = {"bias": True}
LAYERS = {
    "cpu": {}, "compiled, biased": BIASED, "torch": {"kernels": "torch"}, "grouped_mm": {"kernels": "grouped_mm"},
    "recipe": {"recipe": FP8Blockwise(backend="emulated")},
}  # fmt: skip


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(M, D, generator=g), torch.rand(M, K, generator=g)
    return (
        x.requires_grad_(),
        torch.randint(0, E, (M, K), generator=g),
        w.requires_grad_(),
        torch.randn(M, D, generator=g),
    )


def experts(**options: object) -> ExpertMLP:
    torch.manual_seed(1)
    return ExpertMLP(E, D, F, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS.keys())
def test_each_part_is_what_it_is_in_the_whole(options: dict[str, object]) -> None:
    layer, (x, ids, w, dy) = experts(**options), inputs()
    leaves = [x, w, *layer.parameters()]
    whole = torch.autograd.grad(layer(x, ids, w), leaves, dy)
    y = layer(x, ids, w)
    for some in ([0], [1], list(range(2, len(leaves))), [2], [len(leaves) - 1], [0, 3]):
        found = torch.autograd.grad(y, [leaves[i] for i in some], dy, retain_graph=True)
        for i, gradient in zip(some, found, strict=True):
            assert_close(gradient, whole[i], 1e-6, f"{i} of {some}")


@pytest.mark.parametrize("mode", ["accumulate", "overwrite"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_main_grad_is_written_by_the_backward_that_is_for_it(mode: str, kernels: str) -> None:
    layer, (x, ids, w, dy) = experts(main_grad=mode, kernels=kernels), inputs()
    truth = torch.autograd.grad(experts(kernels=kernels)(x, ids, w), [x], dy)[0]
    for p in layer.parameters():
        p.main_grad = torch.full(p.shape, 2.0)
    y = layer(x, ids, w)
    (dx,) = torch.autograd.grad(y, [x], dy, retain_graph=True)  # the first half of a zero-bubble schedule's backward
    assert_close(dx, truth, 1e-6, "dx")
    for p in layer.parameters():
        assert torch.equal(p.main_grad, torch.full(p.shape, 2.0))
        assert not hasattr(p, "grad_added_to_main_grad")
    torch.autograd.grad(y, list(layer.parameters()), dy)  # the second
    plain = experts(kernels=kernels)
    wanted = torch.autograd.grad(plain(x, ids, w), list(plain.parameters()), dy)
    for p, gradient in zip(layer.parameters(), wanted, strict=True):
        assert_close(p.main_grad, gradient + (2.0 if mode == "accumulate" else 0.0), 1e-6, mode)


@pytest.mark.parametrize("bias", [False, True])
def test_a_grouped_linear_likewise(bias: bool) -> None:
    torch.manual_seed(2)
    layer = GroupedLinear(3, D, F, bias=bias, main_grad="accumulate")
    for p in layer.parameters():
        p.main_grad = torch.zeros(p.shape)
    x, sizes = torch.randn(9, D, requires_grad=True), torch.tensor([4, 0, 5])
    y, dy = layer(x, sizes), torch.randn(9, F)
    torch.autograd.grad(y, [x], dy, retain_graph=True)
    assert not any(p.main_grad.any() for p in layer.parameters())
    y.backward(dy)
    weight = next(iter(layer.parameters()))
    assert_close(weight.main_grad[0], (dy[:4].T @ x[:4]).detach(), 1e-6, "weight")


def test_frozen_and_inner_weights() -> None:
    """Nodes are those of the inputs that need a gradient, whichever these are; a weight need not be a leaf."""
    layer, (x, ids, w, dy) = experts(bias=True), inputs()
    layer.gate_up.requires_grad_(False)
    layer.down_bias.requires_grad_(False)  # type: ignore[union-attr]
    nn.utils.parametrizations.weight_norm(layer, "down")
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    whole = torch.autograd.grad(layer(x, ids, w), leaves, dy)
    y = layer(x, ids, w)
    for i, leaf in enumerate(leaves):
        assert_close(torch.autograd.grad(y, [leaf], dy, retain_graph=True)[0], whole[i], 1e-6, str(i))
