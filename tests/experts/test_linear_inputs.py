"""What GroupedLinear takes: group sizes from the host or a device, and what it refuses, with what was expected."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from experts.test_linear import A, B, G, linear, with_main_grad
from trimtab.errors import BackendError, ConfigError, InputError
from trimtab.experts.grouped_ops import _on_device
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.weight_grad import MODES


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


@pytest.mark.parametrize(
    "sizes",
    [
        [3, 0, 2, 1], (3, 0, 2, 1), torch.tensor([3, 0, 2, 1]), np.bincount([0, 0, 0, 2, 2, 3]), [np.int64(3), 0, 2, 1],
        np.array([3, 0, 2, 1], dtype=np.uint8),
    ],
    ids=lambda s: type(s).__name__,
)  # fmt: skip
def test_forms_of_sizes_agree(sizes: object) -> None:
    layer, x = linear(), torch.randn(8, A)
    assert torch.equal(layer(x, sizes), layer(x, torch.tensor([3, 0, 2, 1], dtype=torch.int32)))


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


def test_bad_device_sizes_are_refused_by_form() -> None:
    layer, x = linear(device="meta"), torch.empty(8, A, device="meta")
    with pytest.raises(InputError, match="have 3 entries"):
        layer(x, torch.empty(3, dtype=torch.int64, device="meta"))
    with pytest.raises(InputError, match="int32 or int64"):
        layer(x, torch.empty(4, device="meta"))


def test_bad_device_sizes_trip_an_assertion_on_the_device() -> None:
    assert _on_device(torch.tensor([2, 0, 1]), 4).tolist() == [0, 2, 2, 3]
    for bad in ([2, 3], [4, -1]):
        with pytest.raises(RuntimeError, match="group_sizes are negative or sum to more"):
            _on_device(torch.tensor(bad), 4)


def test_bad_rows_and_options_are_refused() -> None:
    layer = linear()
    x = torch.randn(8, A)
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
    with pytest.raises(ConfigError, match="main_grad='add'"):
        linear(main_grad="add")
    with pytest.raises(ConfigError, match="at least 1"):
        GroupedLinear(0, A, B)
    with pytest.raises(BackendError, match="float64"):
        linear(dtype=torch.float64, kernels="grouped_mm")(torch.randn(8, A, dtype=torch.float64), [0] * G)
