"""GroupedLinear beyond the grid of pairs: what it takes and refuses, its state dicts, microbatches, what is saved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from helpers.comparing import assert_close
from helpers.pair_truth import linear_truth
from trimtab.errors import BackendError, ConfigError, InputError
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.segments import _on_device
from trimtab.experts.weight_grad import MODES
from trimtab.kernels.choose import KernelChoice

G, A, B = 4, 16, 24
MANY = 12  # more than ten groups: "weight10" is not "weight1" and a 0


def linear(groups: int = G, seed: int = 0, **options: Any) -> GroupedLinear:
    torch.manual_seed(seed)
    return GroupedLinear(groups, A, B, **{"bias": True, "dtype": torch.float32, **options})


def with_main_grad(layer: GroupedLinear, value: float = 0.0) -> GroupedLinear:
    for param in layer.weights:
        param.main_grad = torch.full_like(param, value, dtype=torch.float32)  # type: ignore[attr-defined]
    return layer


def stacked(layer: GroupedLinear, what: str = "data") -> list[Tensor]:
    """`what` of all weights and of all biases."""
    found = [[getattr(p, what) for p in params] for params in (layer.weights, layer.biases)]
    return [each[0] if layer.single_parameter else torch.stack(each) for each in found]


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
            found = [p.main_grad for p in layer.weights]
            torch.testing.assert_close(found[0] if single else torch.stack(found), plain.weight.grad)
            layer.weights[0].grad = None
            torch.testing.assert_close(sum(p.grad.sum() for p in layer.biases), plain.bias.grad.sum())


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


def test_rows_of_another_dtype_get_their_own_back_and_any_strides_are_taken() -> None:
    layer, sizes = linear(dtype=torch.bfloat16), [2, 0, 3, 1]
    x, dy = torch.randn(6, A, requires_grad=True), torch.randn(6, B).bfloat16()
    y = layer(x, sizes)
    y.backward(dy.float())
    assert y.dtype == x.grad.dtype == torch.float32
    truth = linear_truth(x.bfloat16(), layer.weight, layer.bias, dy, sizes)
    for got, true in zip((y, x.grad, layer.weight.grad), truth, strict=False):
        assert_close(got, true, 2e-2, "other dtype")
    for kernels in ("torch", "grouped_mm"):
        layer, x = linear(kernels=kernels), torch.randn(2 * A, 6).t()[:, ::2].requires_grad_()
        layer(x, sizes).sum().backward()
        _, dx, dw, _ = linear_truth(x, layer.weight, layer.bias, torch.ones(6, B), sizes)
        assert_close(x.grad, dx, 2e-6, "dX")
        assert_close(layer.weight.grad, dw, 2e-6, "dW")


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("delayed", [True, False])
def test_recompute_gives_the_same_gradients_once(single: bool, delayed: bool) -> None:
    found = []
    for recompute in (False, True):
        layer = with_main_grad(linear(single_parameter=single, delay_wgrad=delayed, main_grad="accumulate"))
        x = torch.randn(6, A, generator=torch.Generator().manual_seed(1)).requires_grad_()
        sizes = [2, 0, 3, 1]
        y = torch.utils.checkpoint.checkpoint(layer, x, sizes, use_reentrant=False) if recompute else layer(x, sizes)
        y.square().sum().backward()
        layer.backward_dw()
        found.append([x.grad, *(p.main_grad for p in layer.weights), *(p.grad for p in layer.biases)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_no_gradient_mode_sharing_a_choice_and_what_it_says() -> None:
    choice = KernelChoice()
    with torch.no_grad():
        assert not linear(kernels=choice)(torch.randn(6, A), [2, 0, 3, 1]).requires_grad
    linear(kernels=choice)(torch.randn(6, A), [2, 0, 3, 1])
    assert len(choice.reports) == 1
    assert repr(linear(main_grad="accumulate", delay_wgrad=True, single_parameter=False)) == (
        "GroupedLinear(4 x (16 -> 24), bias=True, single_parameter=False, main_grad='accumulate', delay_wgrad=True)"
    )


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_device_sizes_are_never_read(single: bool, mode: str, delayed: bool, dtype: torch.dtype) -> None:
    """Tensors on `meta` have no values: any read by the host, forward or backward, would raise."""
    layer = linear(dtype=torch.bfloat16, device="meta", single_parameter=single, main_grad=mode, delay_wgrad=delayed)
    with_main_grad(layer)
    x = torch.empty(11, A, dtype=torch.bfloat16, device="meta", requires_grad=True)
    y = layer(x, torch.empty(G, dtype=dtype, device="meta"))
    assert (y.shape, y.dtype, y.device.type) == ((11, B), torch.bfloat16, "meta")
    y.sum().backward()
    layer.backward_dw()
    assert x.grad.shape == x.shape
    assert all(p.grad.shape == p.shape for p in layer.parameters())


def test_forms_of_sizes_agree() -> None:
    layer, x, sizes = linear(), torch.randn(8, A), [3, 0, 2, 1]
    wanted = layer(x, torch.tensor(sizes, dtype=torch.int32))
    array = np.array(sizes, dtype=np.uint8)
    for form in (
        sizes, tuple(sizes), torch.tensor(sizes), np.bincount([0, 0, 0, 2, 2, 3]), [np.int64(3), 0, 2, 1], array,
    ):  # fmt: skip
        assert torch.equal(layer(x, form), wanted)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([1, 2, 3], "have 3 entries for 4 groups"),
        (torch.tensor([1, 2, 3, 1, 0]), "have 5 entries for 4 groups"),
        ([1, -2, 3, 0], "must not be negative, but group 1 has -2"),
        (torch.tensor([0, 0, 0, -1]), "must not be negative, but group 3 has -1"),
        ([3, 3, 3, 0], "sum to 9, but there are only 8 rows"),
        (torch.tensor([9, 0, 0, 0]), "sum to 9, but there are only 8 rows"),
        ([1.0, 2, 3, 0], "must hold ints, found 1.0"),
        ([True, 2, 3, 0], "must hold ints, found True"),
        (np.array([1.0, 2, 3, 0]), r"must hold ints, found .*1\.0"),
        (np.array([True, False, True, False]), "must hold ints, found .*True"),
        (np.array([[1, 2], [3, 0]]), "must hold ints, found array"),
        (np.array(8), "must be a list, array or tensor"),
        (None, "must be a list, array or tensor of ints, got None"),
        ([torch.tensor(1), 2, 3, 0], "must hold ints, found tensor"),
        (torch.tensor([1.0, 2, 3, 0]), "must be int32 or int64, got torch.float32"),
        (torch.tensor([1, 2, 3, 0], dtype=torch.int16), "must be int32 or int64, got torch.int16"),
        (torch.tensor([[1, 2, 3, 0]]), "must be one-dimensional"),
        (torch.empty(4, dtype=torch.int64, device="meta"), "are on meta and the rows on cpu"),
    ],
)
def test_bad_sizes_are_refused_before_anything_runs(sizes: object, message: str) -> None:
    with pytest.raises(InputError, match=rf"phase experts.*group_sizes {message}"):
        linear()(torch.randn(8, A), sizes)


def test_bad_sizes_on_a_device_are_refused_by_form_and_trip_an_assertion_there() -> None:
    layer, x = linear(device="meta"), torch.empty(8, A, device="meta")
    with pytest.raises(InputError, match="have 3 entries"):
        layer(x, torch.empty(3, dtype=torch.int64, device="meta"))
    with pytest.raises(InputError, match="int32 or int64"):
        layer(x, torch.empty(4, device="meta"))
    assert _on_device(torch.tensor([2, 0, 1]), 4).tolist() == [0, 2, 2, 3]
    for bad in ([2, 3], [4, -1]):
        with pytest.raises(RuntimeError, match="group_sizes are negative or sum to more"):
            _on_device(torch.tensor(bad), 4)


def test_bad_rows_and_options_are_refused() -> None:
    layer, x = linear(), torch.randn(8, A)
    for bad in (
        torch.randn(8, A + 1), torch.randn(8), x.long(), x.to(torch.float8_e4m3fn), x.to_sparse(),
        torch.nested.nested_tensor([x, x]), torch.nested.nested_tensor([x, x], layout=torch.jagged),
    ):  # fmt: skip
        with pytest.raises(InputError, match=r"x must be floating \[R, 16\]"):
            layer(bad, [0] * G)
    with pytest.raises(InputError, match="x is on meta, the weights on cpu"):
        layer(torch.empty(8, A, device="meta"), [0] * G)
    for single in (True, False):
        cast = linear(single_parameter=single).requires_grad_(False)
        last = [*cast.parameters()][-1]
        last.data = last.data.to(torch.float8_e5m2)
        with pytest.raises(ConfigError, match=r"in torch\.float8_e5m2: keep parameters in"):
            cast(x, [0] * G)
    with pytest.raises(InputError, match=r"weight0\.main_grad is None"):
        linear(main_grad="accumulate", single_parameter=False)(x, [2, 0, 3, 1]).sum().backward()
    with pytest.raises(ConfigError, match="at least 1"):
        GroupedLinear(0, A, B)
    with pytest.raises(BackendError, match="float64"):
        linear(dtype=torch.float64, kernels="grouped_mm")(torch.randn(8, A, dtype=torch.float64), [0] * G)


@pytest.mark.parametrize("source", [True, False])
@pytest.mark.parametrize("target", [True, False])
@pytest.mark.parametrize("assign", [True, False])
def test_either_form_loads_into_either(source: bool, target: bool, assign: bool) -> None:
    for nested in (True, False):
        ours, theirs = (linear(MANY, seed, single_parameter=way) for seed, way in enumerate((source, target)))
        module, into = (nn.Sequential(ours), nn.Sequential(theirs)) if nested else (ours, theirs)
        state = module.state_dict()
        names = list(state)
        into.load_state_dict(state, assign=assign)
        assert list(state) == names  # the caller's dict is not touched
        assert all(torch.equal(a, b) for a, b in zip(stacked(ours), stacked(theirs), strict=True))
        theirs(torch.randn(5, A), [5] + [0] * (MANY - 1)).sum().backward()
        assert all(p.grad is not None for p in theirs.parameters())
    each = [f"{name}{i}" for name in ("weight", "bias") for i in range(MANY)]
    assert list(ours.state_dict()) == (["weight", "bias"] if source else each)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("target", [True, False])
def test_counts_are_checked_in_both_directions_even_without_strict(strict: bool, target: bool) -> None:
    whole = linear(MANY, single_parameter=False).state_dict()
    without = {name: value for name, value in whole.items() if name != "weight3"}
    for state, says in (
        (without, r"11 of weight\*, expected weight0 \.\. weight11: missing \[3\]"),
        (whole | {"bias12": torch.zeros(B)}, r"13 of bias\*.*unexpected \[12\]"),
        (whole | {"weight": torch.zeros(MANY, B, A)}, "has both weight and weight0"),
        ({"weight": torch.zeros(MANY - 1, B, A)}, r"has weight \(11, 24, 16\), expected 12 groups"),
    ):
        with pytest.raises(InputError, match=says):
            linear(MANY, single_parameter=target).load_state_dict(state, strict=strict)


def test_missing_and_transposed_entries_are_reported_as_ever() -> None:
    whole = linear(MANY, single_parameter=False).state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
        linear(MANY).load_state_dict(linear(MANY, single_parameter=False, bias=False).state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        linear(MANY).load_state_dict(whole | {f"weight{i}": torch.zeros(A, B) for i in range(MANY)})
