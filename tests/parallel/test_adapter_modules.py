"""Adapters as parameters of a model: added, chosen, merged, saved, and spread over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import trimtab
from helpers.ranks import run_ranks
from trimtab.checkpoint.save_load import load, save
from trimtab.errors import ConfigError

E, D, F, T = 4, 16, 24, 11


def layer(**options: object) -> trimtab.MoE:
    torch.manual_seed(0)
    router = trimtab.RouterConfig(num_experts=E, top_k=2)
    given = {"dim": D, "hidden": F, "dtype": torch.float64} | options
    return trimtab.MoEConfig(router=router, **given).build()  # type: ignore[arg-type]


def rows(dim: int = D) -> Tensor:
    return torch.randn(T, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def moved(params: list[nn.Parameter]) -> None:
    """b begins at zero: somewhere else, the same on every rank."""
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for param in params:
            value = torch.randn(param.shape, dtype=torch.float64, generator=g) / 4
            if isinstance(param, DTensor):
                value = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
            param.copy_(value)


def test_what_an_adapter_adds_begins_at_nothing_and_can_be_switched_off() -> None:
    moe = layer()
    base = moe(rows()).y
    params = trimtab.add_adapter(moe, rank=3, shared=False)
    assert [tuple(p.shape) for p in params] == [(E, 3, D), (E, 2, F, 3), (E, 3, F), (E, D, 3)]
    assert torch.equal(moe(rows()).y, base)
    moved(params)
    one = moe(rows()).y
    assert not torch.allclose(one, base)
    moved(trimtab.add_adapter(moe, "second", rank=2, alpha=8, weights=["down"], shared=True, rank_stabilized=True))
    second = moe(rows()).y
    trimtab.set_adapter(moe, "default")
    assert torch.equal(moe(rows()).y, one)
    trimtab.set_adapter(moe)
    assert torch.equal(moe(rows()).y, base)
    trimtab.set_adapter(moe, "default", "second")
    both = moe(rows()).y
    trimtab.merge_adapter(moe, "second")
    torch.testing.assert_close(moe(rows()).y, both)
    assert trimtab.merge_adapter(moe, "default") == 2 * E
    torch.testing.assert_close(moe(rows()).y, both)
    assert not torch.allclose(second, both)
    assert not list(moe.experts.adapters.parameters())


def test_only_the_active_adapter_and_what_is_not_experts_is_trained() -> None:
    moe = layer()
    trimtab.add_adapter(moe, "idle", rank=2)
    trimtab.add_adapter(moe, "active", rank=2)
    moe(rows()).y.sum().backward()
    trained = {name for name, param in moe.named_parameters() if param.grad is not None}
    assert trained == {"router.weight"} | {
        f"experts.adapters.active.{name}" for name in ("gate_up_a", "gate_up_b", "down_a", "down_b")
    }


def test_a_grouped_linear_with_an_adapter_is_one_with_the_delta() -> None:
    torch.manual_seed(0)
    linear = trimtab.GroupedLinear(3, 8, 6, dtype=torch.float64)
    x = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    moved(trimtab.add_adapter(linear, rank=2))
    y = linear(x, [4, 0, 5])
    y.square().sum().backward()
    grads = {name: param.grad for name, param in linear.named_parameters() if param.grad is not None}
    assert set(grads) == {"adapters.default.weight_a", "adapters.default.weight_b"}
    dx, scale = x.grad, linear.get_submodule("adapters.default").scale
    a, b = (p.detach().clone().requires_grad_() for p in linear.get_submodule("adapters.default").parameters())
    weight = linear.weight.detach() + scale * (b @ a)
    other = x.detach().clone().requires_grad_()
    groups = torch.tensor([0] * 4 + [2] * 5)
    true = torch.einsum("ri,roi->ro", other, weight[groups]) + linear.bias.detach()[groups]
    true.square().sum().backward()
    for got, expected in ((y, true), (dx, other.grad), (grads["adapters.default.weight_a"], a.grad),
                          (grads["adapters.default.weight_b"], b.grad)):  # fmt: skip
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank"),
        ({"rank": 2, "dropout": 1.0}, "dropout"),
        ({"rank": 2, "name": "a.b"}, "identifier"),
        ({"rank": 2, "weights": ["gate"]}, "no module"),
        ({"rank": 2, "name": "default"}, "already"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, object], message: str) -> None:
    moe = layer()
    trimtab.add_adapter(moe, rank=2)
    with pytest.raises(ConfigError, match=message):
        trimtab.add_adapter(moe, **options)
    with pytest.raises(ConfigError, match="no adapter other"):
        trimtab.set_adapter(moe, "other")
    with pytest.raises(ConfigError, match="no adapter 'other'"):
        trimtab.merge_adapter(moe, "other")


def test_compiled_in_one_graph() -> None:
    moe = layer()
    moved(trimtab.add_adapter(moe, rank=2))
    expected = moe(rows()).y
    found = torch.compile(moe, backend="aot_eager", fullgraph=True)(rows()).y
    torch.testing.assert_close(found, expected)


def _after_parallelize(folder: Path) -> None:
    """Added before or after the cut they are the same; saved by two ranks of F and loaded by two of the experts."""
    outputs, world = [], 2
    for names, shape, late in ((("etp", "ep"), (world, 1), False), (("etp", "ep"), (1, world), True)):
        moe, mesh = layer(), init_device_mesh("cpu", shape, mesh_dim_names=names)
        style = trimtab.ExpertParallel(etp="etp")
        if late:
            trimtab.parallelize(moe, mesh, {"": style})
        torch.manual_seed(3)
        params = trimtab.add_adapter(moe, rank=2)
        if not late:
            trimtab.parallelize(moe, mesh, {"": style})
            params = list(moe.experts.get_submodule("adapters.default").parameters())
            moved(params)
            save(folder, moe, step=1)
        else:
            load(folder, moe)
        assert all(isinstance(param, DTensor) for param in params)
        outputs.append(moe(rows()).y)
        trimtab.merge_adapter(moe, "default")
        torch.testing.assert_close(moe(rows()).y, outputs[-1])
    torch.testing.assert_close(*outputs)
    alone = layer()
    moved(trimtab.add_adapter(alone, rank=2))
    torch.testing.assert_close(outputs[0], alone(rows()).y)


def test_before_and_after_parallelize_and_from_one_cut_to_another(tmp_path: Path) -> None:
    run_ranks(_after_parallelize, 2, tmp_path)


def _cut_blocks() -> str:
    moe = layer(dim=64, hidden=128)
    moe.experts.quantize_("nf4")
    with pytest.raises(ConfigError) as raised:
        trimtab.parallelize(
            moe, init_device_mesh("cpu", (4, 1), mesh_dim_names=("etp", "ep")), {"": trimtab.ExpertParallel(etp="etp")}
        )
    return str(raised.value)


@pytest.mark.xdist_group("ranks4")
def test_a_share_that_begins_within_a_block_is_refused() -> None:
    for said in run_ranks(_cut_blocks, 4):
        assert (
            "F = 128 over 4 expert-tensor-parallel ranks cuts blocks of codes in two: a share must be a multiple of 64"
            in said
        )
