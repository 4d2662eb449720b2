"""Adapters as parameters of a model: added, chosen, merged, saved, and spread over ranks. In a training, with
accumulation and clipping, they are rows of `test_layouts`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

import trimtab
from helpers.ranks import run_ranks
from trimtab.checkpoint.save_load import load, save
from trimtab.errors import ConfigError
from trimtab.parallel.meshes import local_part

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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank"), ({"rank": 2, "dropout": 1.0}, "dropout"), ({"rank": 2, "name": "a.b"}, "identifier"),
        ({"rank": 2, "weights": ["gate"]}, "no module"), ({"rank": 2, "name": "default"}, "already"),
    ],
)  # fmt: skip
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
    alone, saved = layer(), layer()
    moved(trimtab.add_adapter(saved, rank=2))
    trimtab.add_adapter(alone, rank=2)
    load(tmp_path, alone)  # one process reads what two wrote
    assert all(map(torch.equal, alone.parameters(), saved.parameters()))


def _dropped() -> None:
    """Dropout draws the same in each kind of recompute."""
    found, rank = [], dist.get_rank()
    recomputed = {"use_reentrant": False, "context_fn": trimtab.replay_in_recompute}
    for dropout, way in ((0.0, {}), (0.4, {}), (0.4, {"use_reentrant": True}), (0.4, recomputed)):
        moe, x = layer(), rows().requires_grad_()
        moved(trimtab.add_adapter(moe, rank=3, dropout=dropout))
        trimtab.parallelize(moe, init_device_mesh("cpu", (2,)), {"": trimtab.ExpertParallel()})
        torch.manual_seed(rank)
        y = checkpoint(lambda x, moe=moe: moe(x).y, x, **way) if way else moe(x).y
        y.square().sum().backward()
        grads = [local_part(p.grad) for p in moe.parameters() if p.grad is not None]
        found.append([x.grad, *grads])
    plain, kept, *again = found
    assert len(kept) == 6
    assert not torch.equal(plain[0], kept[0]), "rows were dropped"
    assert all(torch.equal(a, b) for other in again for a, b in zip(kept, other, strict=True)), "the same masks"


def test_dropout_draws_the_same_when_run_again() -> None:
    run_ranks(_dropped, 2)


def _cut_blocks(name: str) -> str:
    moe = layer(dim=64, hidden=128)
    moe.experts.float().quantize_(name)
    with pytest.raises(ConfigError) as raised:
        trimtab.parallelize(
            moe, init_device_mesh("cpu", (4, 1), mesh_dim_names=("etp", "ep")), {"": trimtab.ExpertParallel(etp="etp")}
        )
    return str(raised.value)


CUT = {
    "nf4": "F = 128 over 4 expert-tensor-parallel ranks cuts blocks of codes in two: a share must be a multiple of 64",
    "packed": "packed weights are not cut over F: parallelize without etp, or leave them plain",
}


@pytest.mark.xdist_group("ranks4")
@pytest.mark.parametrize("name", CUT)
def test_a_share_that_begins_within_a_block_is_refused(name: str) -> None:
    for said in run_ranks(_cut_blocks, 4, name):
        assert CUT[name] in said
