"""GroupedLinear beyond the grid: no rows, device sizes, microbatches, what is saved, what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from helpers.comparing import assert_close
from helpers.linear_cases import KERNELS, Case, check, per_group, true_results
from trimtab.errors import InputError
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.weight_grad import MODES
from trimtab.kernels.choose import KernelChoice

G, A, B = 4, 16, 24


def linear(**options: object) -> GroupedLinear:
    torch.manual_seed(0)
    return GroupedLinear(G, A, B, **{"bias": True, "dtype": torch.float32, **options})


def with_main_grad(layer: GroupedLinear, value: float = 0.0) -> GroupedLinear:
    for param in layer.weights:
        param.main_grad = torch.full_like(param, value, dtype=torch.float32)
    return layer


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("mode", ["accumulate", "overwrite"])
def test_main_grad_has_the_owners_dtype(main_dtype: torch.dtype, mode: str) -> None:
    for single in (True, False):
        for splits in KERNELS:
            case = Case(dtype=torch.bfloat16, groups=3, empty="first", single=single, main_grad=mode, splits=splits)
            check(case, main_dtype)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kernels", ["torch", "grouped_mm"])
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_no_tokens_at_all(kernels: str, single: bool, delayed: bool, mode: str) -> None:
    """Output [0, out], every gradient zeros of its shape and dtype, main_grad right over stale values."""
    layer = linear(dtype=torch.bfloat16, single_parameter=single, main_grad=mode, delay_wgrad=delayed, kernels=kernels)
    with_main_grad(layer, 7.0)
    for param in layer.weights:
        param.zero_out_wgrad = True
    x = torch.empty(0, A, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x, [0] * G)
    assert (y.shape, y.dtype) == ((0, B), torch.bfloat16)
    y.sum().backward()
    layer.backward_dw()
    assert x.grad.shape == (0, A)
    for param in layer.parameters():
        assert torch.equal(param.grad, torch.zeros_like(param))
        assert param.grad.dtype == torch.bfloat16
    left = {"off": 7.0, "accumulate": 7.0, "overwrite": 0.0}[mode]
    assert all(torch.equal(p.main_grad, torch.full_like(p.main_grad, left)) for p in layer.weights)


def test_two_microbatches_accumulate_and_each_fires_the_hook_once() -> None:
    sizes, x = [[2, 0, 3, 0], [0, 4, 0, 1]], torch.randn(2, 5, A)
    plain = linear()
    for part, s in zip(x, sizes, strict=True):
        plain(part, s).square().sum().backward()
    for single in (True, False):
        for delayed in (True, False):
            layer = linear(main_grad="accumulate", single_parameter=single, delay_wgrad=delayed)
            layer.load_state_dict(plain.state_dict())
            with_main_grad(layer)
            fired: list[Tensor] = []
            for param in layer.weights:
                param.register_post_accumulate_grad_hook(fired.append)
            outputs = [layer(part, s).square().sum() for part, s in zip(x, sizes, strict=True)]
            for output in outputs:
                output.backward()
            assert len(fired) == (0 if delayed else 2 * len(layer.weights))
            for _ in range(2 if delayed else 0):
                layer.backward_dw()
            assert len(fired) == 2 * len(layer.weights)
            got = torch.stack(per_group(layer, tuple(p.main_grad for p in layer.weights)))
            torch.testing.assert_close(got, plain.weight.grad)
            torch.testing.assert_close(
                torch.stack(per_group(layer, tuple(p.grad for p in layer.biases))), plain.bias.grad
            )


def test_delayed_gradients_come_in_the_order_of_their_backwards_and_only_once() -> None:
    layer, x = linear(delay_wgrad=True), torch.randn(3, A)
    first, second = layer(x, [3, 0, 0, 0]), layer(x, [0, 3, 0, 0])
    second.sum().backward()
    first.sum().backward()
    layer.backward_dw()
    assert layer.bias.grad[:, 0].tolist() == [0, 3, 0, 0]
    layer.backward_dw()
    assert layer.bias.grad[:, 0].tolist() == [3, 3, 0, 0]
    with pytest.raises(InputError, match="without a backward before it"):
        layer.backward_dw()
    linear().backward_dw()  # not delayed: nothing to do, so pipelines may call it on every layer


def test_delayed_gradients_of_an_input_that_needs_none() -> None:
    layer, x = linear(delay_wgrad=True), torch.randn(3, A)
    layer(x, [1, 0, 2, 0]).sum().backward()
    layer.backward_dw()
    plain = linear()
    plain(x, [1, 0, 2, 0]).sum().backward()
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    assert torch.equal(layer.bias.grad, plain.bias.grad)


@pytest.mark.parametrize("delayed", [False, True])
def test_frozen_parameters_get_nothing_and_the_others_keep_theirs(delayed: bool) -> None:
    x = torch.randn(6, A)
    plain = linear(single_parameter=False)
    plain(x, [1, 2, 0, 3]).square().sum().backward()
    for frozen in ("weight1", "bias0", "weight3"):
        layer = linear(single_parameter=False, delay_wgrad=delayed)
        layer.get_parameter(frozen).requires_grad_(False)
        layer(x.clone().requires_grad_(), [1, 2, 0, 3]).square().sum().backward()
        layer.backward_dw()
        for name, param in layer.named_parameters():
            if name == frozen:
                assert param.grad is None
            else:
                torch.testing.assert_close(param.grad, plain.get_parameter(name).grad)
    layer = linear(single_parameter=False, delay_wgrad=delayed, main_grad="overwrite")
    layer.weight1.requires_grad_(False)
    for param in (layer.weight0, layer.weight2, layer.weight3):
        param.main_grad = torch.full_like(param, 9.0)
    layer(x, [1, 2, 0, 3]).square().sum().backward()
    layer.backward_dw()
    assert layer.weight1.grad is None
    assert torch.equal(layer.weight2.main_grad, torch.zeros(B, A))  # empty: zeros over what was there
    layer = linear(delay_wgrad=delayed).requires_grad_(False)
    leaf = x.clone().requires_grad_()
    layer(leaf, [1, 2, 0, 3]).sum().backward()
    layer.backward_dw()
    assert leaf.grad is not None


def saved_bytes(layer: GroupedLinear, x: Tensor) -> int:
    """Bytes that the graph holds beyond x and the parameters."""
    own = {t.data_ptr() for t in (x, *layer.parameters())}
    saved: dict[int, int] = {}
    keep = lambda t: saved.__setitem__(t.data_ptr(), t.numel() * t.element_size()) or t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        layer(x, [2, 0, 3, 1])
    return sum(size for where, size in saved.items() if where not in own)


def test_what_is_saved() -> None:
    x = torch.randn(6, A, requires_grad=True)
    offsets, narrow = 8 * (G + 1), 6 * A * 2
    assert saved_bytes(linear(), x) == offsets  # and x itself
    assert saved_bytes(linear(dtype=torch.bfloat16), x) == offsets + narrow  # what the weight gradient multiplies
    assert saved_bytes(linear(dtype=torch.bfloat16).requires_grad_(False), x) == offsets
    with torch.autocast("cpu", torch.bfloat16):
        assert saved_bytes(linear(), x) == offsets + narrow  # and the parameters themselves, not their copies


def test_rows_of_another_dtype_get_their_own_back() -> None:
    layer = linear(dtype=torch.bfloat16)
    x = torch.randn(6, A, requires_grad=True)
    y = layer(x, [2, 0, 3, 1])
    dy = torch.randn(6, B).bfloat16()
    y.backward(dy.float())
    assert y.dtype == x.grad.dtype == torch.float32
    truth = true_results(x.bfloat16(), layer.weight, layer.bias, dy, [2, 0, 3, 1])
    assert_close(y, truth.y, 2e-2, "output")
    assert_close(x.grad, truth.dx, 2e-2, "dX")
    assert_close(layer.weight.grad, torch.stack(truth.dw), 2e-2, "dW")


def test_a_stride_zero_gradient_and_sliced_rows_are_taken() -> None:
    for choice in KERNELS.values():
        layer, x = linear(kernels=choice), torch.randn(2 * A, 6).t()[:, ::2].requires_grad_()
        layer(x, [2, 0, 3, 1]).sum().backward()
        truth = true_results(x, layer.weight, layer.bias, torch.ones(6, B), [2, 0, 3, 1])
        assert_close(x.grad, truth.dx, 2e-6, "dX")
        assert_close(layer.weight.grad, torch.stack(truth.dw), 2e-6, "dW")


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("delayed", [True, False])
def test_recompute_gives_the_same_gradients_once(single: bool, delayed: bool) -> None:
    found = []
    for recompute in (False, True):
        layer = linear(single_parameter=single, delay_wgrad=delayed, main_grad="accumulate")
        with_main_grad(layer)
        x = torch.randn(6, A, generator=torch.Generator().manual_seed(1)).requires_grad_()
        sizes = [2, 0, 3, 1]
        y = torch.utils.checkpoint.checkpoint(layer, x, sizes, use_reentrant=False) if recompute else layer(x, sizes)
        y.square().sum().backward()
        layer.backward_dw()
        found.append([x.grad, *(p.main_grad for p in layer.weights), *(p.grad for p in layer.biases)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_main_grad_that_is_missing_is_said() -> None:
    layer = linear(main_grad="accumulate", single_parameter=False)
    with pytest.raises(InputError, match=r"weight0\.main_grad is None"):
        layer(torch.randn(6, A), [2, 0, 3, 1]).sum().backward()


def test_no_gradient_mode_and_sharing_a_choice() -> None:
    choice = KernelChoice()
    with torch.no_grad():
        assert not linear(kernels=choice)(torch.randn(6, A), [2, 0, 3, 1]).requires_grad
    linear(kernels=choice)(torch.randn(6, A), [2, 0, 3, 1])
    assert len(choice.reports) == 1


def test_it_says_what_it_is() -> None:
    assert repr(linear(main_grad="accumulate", delay_wgrad=True, single_parameter=False)) == (
        "GroupedLinear(4 x (16 -> 24), bias=True, single_parameter=False, main_grad='accumulate', delay_wgrad=True)"
    )
