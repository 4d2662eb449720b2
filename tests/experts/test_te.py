"""`trimtab.transformer_engine.GroupedLinear`: TransformerEngine's constructor, call, attributes and methods; numbers
in every form are in the grid of pairs.

Legend: R rows, G groups, A in features, B out features."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trimtab
from helpers.comparing import assert_close
from helpers.house import TESTS
from trimtab.errors import ConfigError, InputError
from trimtab.experts.recipes import MXFP8
from trimtab.integrations.transformer_engine import GroupedLinear

G, A, B, R = 4, 16, 24, 11
SPLITS = {"uneven": [3, 0, 4, 1], "one takes all": [0, 0, 8, 0], "first is empty": [0, 5, 1, 2], "none": [0, 0, 0, 0]}
FORMS = {"separate": (False, False), "single": (True, True), "weight": (True, False), "bias": (False, True)}


def layer(**options: Any) -> GroupedLinear:
    torch.manual_seed(0)
    made = GroupedLinear(G, A, B, **{"params_dtype": torch.float32, "device": "cpu", **options})
    with torch.no_grad():
        for one in made._params("bias") if made.use_bias else ():
            one.normal_()
    return made


def per_group(made: GroupedLinear, name: str, what: str) -> list[Tensor]:
    """`what` ("data", "grad", "main_grad") of each group's weight or bias."""
    found = [getattr(param, what) for param in made._params(name)]
    return list(found[0]) if made._stacked(name) else found


def poisoned_rows(splits: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    x_RA = torch.randn(R, A, dtype=dtype)
    x_RA[sum(splits) :] = float("nan")
    return x_RA.requires_grad_()


@pytest.mark.parametrize("form", FORMS)
def test_biases_are_given_back_and_not_added(form: str) -> None:
    weight, bias = FORMS[form]
    made = layer(return_bias=True, single_grouped_weight=weight, single_grouped_bias=bias)
    x_RA = torch.randn(R, A)
    y_RB, found = made(x_RA, [R, 0, 0, 0])
    assert_close(y_RB, x_RA @ per_group(made, "weight", "data")[0].t(), 1e-5, "values")
    if bias:
        assert found is made.bias
    else:
        assert all(one is param for one, param in zip(found, made._params("bias"), strict=True))
    (y_RB.sum() + sum(one.sum() * i for i, one in enumerate(found))).backward()
    assert [one[0].item() for one in per_group(made, "bias", "grad")] == [0, 1, 2, 3]
    assert [one.numel() for one in layer(bias=False, return_bias=True)(x_RA, [R, 0, 0, 0])[1]] == [0] * G
    in_bf16 = made.bfloat16()(x_RA.bfloat16(), [R, 0, 0, 0])[1]
    assert in_bf16[0].dtype == torch.bfloat16


def test_rows_may_have_more_dimensions_and_autocast_is_heeded() -> None:
    made, x = layer(), torch.randn(2, 3, A)
    assert made(x, [6, 0, 0, 0]).shape == (2, 3, B)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert made(x, [1, 2, 3, 0]).dtype == torch.bfloat16
    assert made(torch.empty(0, A), [0] * G).shape == (0, B)


def test_buffers_of_the_callers_are_written() -> None:
    for splits in SPLITS.values():
        made, plain = layer(), layer()
        x_RA, out, dgrad = poisoned_rows(splits), torch.full((R, B), 7.0), torch.full((R, A), 7.0)
        again = x_RA.detach().clone().requires_grad_()
        inner = x_RA * 1
        y_RB = made(inner, splits, out=out, dgrad_out=dgrad)
        assert y_RB.data_ptr() == out.data_ptr()
        y_RB[: sum(splits)].square().sum().backward()
        other = plain(again, splits)
        other.square().sum().backward()
        held = sum(splits)
        assert torch.equal(y_RB[:held], other[:held])
        assert torch.equal(x_RA.grad[:held], again.grad[:held])
        assert torch.equal(dgrad, x_RA.grad)
        assert (out[held:] == 7).all()
        assert (dgrad[held:] == 7).all()
        assert torch.equal(made.weight0.grad, plain.weight0.grad)
    for wrong in (torch.empty(R, B + 1), torch.empty(R, B).double(), torch.empty(B, R).t()):
        with pytest.raises(InputError, match=r"out is .* expected"):
            layer()(torch.randn(R, A), [R, 0, 0, 0], out=wrong)


class Under:
    """A tracker of random states, as Megatron's: fork(name) draws from a stream of that name."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, ...]] = []

    @contextmanager
    def fork(self, *name: str) -> Any:
        self.seen.append(name)
        yield


def test_it_is_drawn_as_transformer_engine_draws_it() -> None:
    made = GroupedLinear(G, 256, 256, device="cpu")
    weights = torch.stack(per_group(made, "weight", "data"))
    assert abs(weights.std().item() - 0.023) < 1e-4
    assert abs(weights.mean().item()) < 1e-3
    assert not torch.stack(per_group(made, "bias", "data")).any()
    for single in (False, True):
        tracker, shapes = Under(), []
        GroupedLinear(
            G, A, B, device="cpu", get_rng_state_tracker=lambda t=tracker: t, rng_tracker_name="experts",
            init_method=lambda w, s=shapes: s.append(tuple(w.shape)), single_grouped_weight=single,
        )  # fmt: skip
        assert tracker.seen == [("experts",)] * G
        assert shapes == [(B, A)] * G
    meta = GroupedLinear(2, A, B, device="meta")
    meta.to_empty(device="cpu").reset_parameters()
    assert 0 < meta.weight1.std() < 0.03


def test_attributes_and_shapes_of_a_tensor_parallel_share() -> None:
    column = GroupedLinear(2, A, B, parallel_mode="column", tp_size=2, bias=False, device="cpu")
    row = GroupedLinear(2, A, B, parallel_mode="row", tp_size=2, bias=False, device="cpu", sequence_parallel=True)
    assert column.weight1.shape == (B // 2, A)
    assert row.weight1.shape == (B, A // 2)
    for made, dim in ((column, 0), (row, 1)):
        assert all(p.tensor_model_parallel and p.partition_dim == dim for p in made.parameters())
    assert row.sequence_parallel
    assert row.tp_size == 2
    assert GroupedLinear(2, A, B, parallel_mode="column", device="cpu").bias0.partition_dim == 0
    assert GroupedLinear(2, A, B, parallel_mode="row", device="cpu").bias1.sequence_parallel is False
    made = layer(name="here", ub_name="fc1", use_grouped_tensor=True, save_original_input=True)
    names = "num_gemms in_features out_features use_bias return_bias apply_bias fuse_wgrad_accumulation tp_size ub_name"
    found = [getattr(made, name) for name in names.split()]
    assert found == [G, A, B, True, False, True, False, 1, "fc1"]
    assert (made.single_grouped_weight, made.single_grouped_bias, made.name) == (False, False, "here")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ub_overlap_rs": True}, "ub_overlap"), ({"ub_overlap_ag": True}, "ub_overlap"),
        ({"tp_size": 2}, "bias=True with tp_size=2"), ({"parallel_mode": "both"}, "parallel_mode='both'"),
        ({"parallel_mode": "column", "tp_size": 5, "bias": False}, "24 features do not divide by tp_size=5"),
        ({"return_bias": 1}, "return_bias=1"), ({"params_dtype": torch.int64}, "int64"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_a_value_error(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as info:
        layer(**options)
    assert isinstance(info.value, ConfigError)
    with pytest.raises(ValueError, match="3"):
        layer()(torch.randn(R, A), [R, 0, 0])


def test_main_grad_is_told_to_autograd_only_where_somebody_listens() -> None:
    """As TransformerEngine: a gradient of unset memory, or zeros, for Megatron's hooks; none for a plain buffer."""
    made = layer(fuse_wgrad_accumulation=True)
    for i, param in enumerate(made.weights):
        param.main_grad = torch.full_like(param, 5.0)
        if i != 0:
            param.grad_added_to_main_grad = False
        param.zero_out_wgrad = i == 2
        param.overwrite_main_grad = i == 3
    x_RA = torch.randn(R, A)
    made(x_RA, [2, 3, 0, 6]).sum().backward()
    assert made.weight0.grad is None
    assert not hasattr(made.weight0, "grad_added_to_main_grad")
    assert [made.weights[i].grad_added_to_main_grad for i in (1, 2, 3)] == [True] * 3
    assert made.weight1.grad.shape == made.weight1.shape
    assert torch.equal(made.weight2.grad, torch.zeros(B, A))
    assert_close(made.weight0.main_grad, (5 + x_RA[:2].sum(0)).expand(B, A), 1e-5, "values")
    assert torch.equal(made.weight2.main_grad, torch.full((B, A), 5.0))
    assert_close(made.weight3.main_grad, x_RA[5:].sum(0).expand(B, A), 1e-5, "values")
    made(x_RA, [R, 0, 0, 0], is_first_microbatch=True).sum().backward()
    assert_close(made.weight0.main_grad, x_RA.sum(0).expand(B, A), 1e-5, "values")
    made(x_RA, [R, 0, 0, 0], is_first_microbatch=False).sum().backward()
    assert_close(made.weight0.main_grad, 2 * x_RA.sum(0).expand(B, A), 1e-5, "values")


def test_a_main_grad_may_be_made_when_it_is_asked_for() -> None:
    made = layer(fuse_wgrad_accumulation=True)
    for param in made.weights:
        param.__fsdp_param__ = True
        param.get_main_grad = lambda p=param: torch.zeros_like(p)
    made(torch.ones(R, A), [R, 0, 0, 0]).sum().backward()
    assert torch.equal(made.weight0.main_grad, torch.full((B, A), float(R)))
    assert not made.weight1.main_grad.any()


def test_delayed_gradients_add_up_and_hooks_come_once() -> None:
    made, plain, fired = layer(delay_wgrad_compute=True), layer(), []
    made.register_wgrad_accumulation_and_reduce_hooks(lambda: fired.append(1))
    assert made.need_backward_dw()
    assert not plain.need_backward_dw()
    made.backward_dw()
    plain.backward_dw()
    for splits in ([R, 0, 0, 0], [1, 2, 3, 5]):
        x_RA = torch.randn(R, A)
        made(x_RA, splits).sum().backward()
        plain(x_RA, splits).sum().backward()
        made.backward_dw()
        made.backward_dw()
    assert fired == [1, 1]
    for mine, other in zip(made.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
        assert not hasattr(mine, "skip_backward_post_hook")


def test_state_dicts_of_every_form_load_into_every_form() -> None:
    for source, target in product(FORMS.values(), FORMS.values()):
        a = layer(single_grouped_weight=source[0], single_grouped_bias=source[1])
        b = layer(single_grouped_weight=target[0], single_grouped_bias=target[1])
        with torch.no_grad():
            for param in b.parameters():
                param.zero_()
        state = a.state_dict()
        assert state["_extra_state"].numel() == 0
        state["_extra_state3"] = torch.ones(3, dtype=torch.uint8)
        b.load_state_dict(state)
        for name in ("weight", "bias"):
            assert all(map(torch.equal, per_group(a, name, "data"), per_group(b, name, "data")))
    whole = trimtab.GroupedLinear(G, A, B)
    b.load_state_dict(whole.state_dict())
    assert torch.equal(b.weight3, whole.weight[3])
    nn.Sequential(b).load_state_dict(
        {"0._extra_state": torch.ones(9, dtype=torch.uint8), **nn.Sequential(a).state_dict()}
    )
    assert torch.equal(copy.deepcopy(b).weight0, b.weight0)


def test_fp8_of_transformer_engine_is_refused_without_a_recipe_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = SimpleNamespace(is_fp8_enabled=lambda: True, with_fp8_parameters=lambda: False)
    fp8 = SimpleNamespace(FP8GlobalStateManager=asked)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.fp8", fp8)
    x_RA = torch.randn(R, A)
    with pytest.raises(ConfigError, match=r"GroupedLinear\(recipe=\)"):
        layer()(x_RA, [R, 0, 0, 0])
    made = GroupedLinear(2, 64, 64, device="cpu", bias=False, recipe=MXFP8(backend="emulated"))
    assert made(torch.randn(5, 64), [2, 3]).shape == (5, 64)
    asked.with_fp8_parameters = lambda: True
    with pytest.raises(ConfigError, match="quantized_model_init"):
        layer()


@pytest.mark.parametrize("options", [{}, {"return_bias": True}, {"delay_wgrad_compute": True}], ids=str)
def test_compiled_and_copied(options: dict[str, Any]) -> None:
    made = layer(**options)
    other, x_RA = pickle.loads(pickle.dumps(copy.deepcopy(made))), torch.randn(R, A)
    whole = not made.delay_wgrad
    y, z = torch.compile(made, backend="eager", fullgraph=whole)(x_RA, [4, 0, 7, 0]), other(x_RA, [4, 0, 7, 0])
    for one in (y, z):
        (one[0] if options.get("return_bias") else one).sum().backward()
    for each in (made, other):
        each.backward_dw()
    assert torch.equal(made.weight2.grad, other.weight2.grad)


def test_the_example_of_the_page_runs() -> None:
    page = (TESTS.parent / "docs" / "api.md").read_text(encoding="utf-8")
    (example,) = [
        each
        for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "trimtab.integrations.transformer_engine" in each
    ]
    found: dict[str, Any] = {}
    exec(example, found)
    assert found["y"].shape == (10, 128)
    buffers = [weight.main_grad for weight in found["layer"].parameters()]
    assert [bool(buffer.any()) for buffer in buffers] == [True, False, True, False]
    assert trimtab.integrations.transformer_engine.GroupedLinear is GroupedLinear
