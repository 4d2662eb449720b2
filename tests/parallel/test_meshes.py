"""Which meshes fit together; balance losses set by hand stay."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from helpers.layout_truth import D as DIM
from helpers.layout_truth import Model, build
from helpers.ranks import run_ranks
from trimtab.errors import ConfigError, InputError
from trimtab.parallel.ddp import ddp, reduce_main_grads
from trimtab.parallel.expert_parallel import ExpertParallel, parallelize
from trimtab.parallel.fsdp import fully_shard_moe
from trimtab.routing.losses import LossGroups


def spread(mesh: DeviceMesh, **options: object) -> Model:
    model = build(torch.float32)
    parallelize(model, mesh, {"layers.*.moe": ExpertParallel(**options)})  # type: ignore[arg-type]
    return model


def meshes_on_rank() -> dict[str, str]:
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "inner"))
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    edp = init_device_mesh("cpu", (1, 4), mesh_dim_names=("edp", "ep"))["edp"]

    def refused(model: Model, dp: DeviceMesh, way: object = ddp) -> str:
        with pytest.raises(ConfigError) as caught:
            way(model, dp, edp)  # type: ignore[operator]
        assert all(layer["moe"].token_meshes.data is None for layer in model.layers)
        return str(caught.value)

    said = {
        "cp outside": refused(spread(whole, cp_mesh=dense["inner"]), dense["dp"]),
        "tp inside": refused(spread(whole, tokens="sharded", tp_mesh=dense["inner"]), whole, fully_shard_moe),
        "tokens": refused(spread(whole), dense["dp"]),
        "main_grad": refused_main_grad(whole, edp),
    }
    assert [resharded(whole, *sizes) for sizes in ((2, 1), (2, 4), (4, 2))] == [(2, 1), (2, 2), (4, 2)]
    cp = spread(whole, cp_mesh=dense["inner"])
    wrapped = ddp(cp, whole, edp)
    groups = cp.layers[0]["moe"].router.groups
    assert groups == LossGroups(batch=(whole.get_group(),), sequence=(dense["inner"].get_group(),), divisor=4)
    tp = spread(whole, tokens="sharded", tp_mesh=dense["inner"])
    inner = (dense["inner"].get_group(),)
    assert tp.layers[0]["moe"].router.groups == LossGroups(batch=inner, sequence=inner, divisor=1)
    fully_shard_moe(tp, dense["dp"], edp)
    both = (*inner, dense["dp"].get_group())
    assert tp.layers[0]["moe"].router.groups == LossGroups(batch=both, sequence=inner, divisor=2)
    return said | {"wrapped": type(wrapped).__name__, "by hand": by_hand(whole, edp)}


def resharded(whole: DeviceMesh, given: int, copies: int) -> tuple[int, int]:
    """To how many ranks dense parameters and experts are, of four that hold `copies` of each expert."""
    mesh = init_device_mesh("cpu", (copies, 4 // copies), mesh_dim_names=("edp", "ep"))
    model = spread(mesh["ep"])
    fully_shard_moe(model, whole, mesh["edp"], blocks=["layers.*.moe"], reshard_after_forward=given)
    units = (model.layers[0]["moe"], model.layers[0]["moe"].experts)
    dense, experts = (unit._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info for unit in units)
    return dense.shard_mesh_size, experts.shard_mesh_size


def refused_main_grad(whole: DeviceMesh, edp: DeviceMesh) -> str:
    model = build(torch.float32, main_grad="accumulate")
    parallelize(model, whole, {"layers.*.moe": ExpertParallel()})
    with pytest.raises(ConfigError) as caught:
        fully_shard_moe(model, whole, edp)
    with pytest.raises(InputError, match=r"^layers\.0\.moe\.experts\.gate_up, .*: no main_grad to reduce") as absent:
        reduce_main_grads(model, whole, edp)
    assert "layers.1.moe.experts.down" in str(absent.value)
    return str(caught.value)


def by_hand(whole: DeviceMesh, edp: DeviceMesh) -> str:
    """Set before, in between and after: it stays."""
    mine = LossGroups(batch=whole.get_group())
    model = build(torch.float32)
    routers = [layer["moe"].router for layer in model.layers]
    routers[0].groups = mine
    parallelize(model, whole, {"layers.*.moe": ExpertParallel()})
    kept = routers[0].groups is mine
    routers[1].groups = mine
    ddp(model, whole, edp)
    return str(kept and all(router.groups is mine for router in routers))


@pytest.mark.xdist_group("ranks4")
def test_meshes_that_do_not_fit_are_refused_and_losses_follow_from_those_that_do() -> None:
    for said in run_ranks(meshes_on_rank, 4):
        assert "of cp_mesh must be in it: gradients are averaged over DP x CP" in said["cp outside"]
        assert "of tp_mesh must not" in said["tp inside"]
        assert "layer layers.0.moe" in said["tokens"]
        assert "it makes 2 ranks with tokens, but 4 hold experts" in said["tokens"]
        assert "main_grad go with ddp" in said["main_grad"]
        assert (said["wrapped"], said["by hand"]) == ("DistributedDataParallel", "True")


def copies_on_rank() -> list[float]:
    """Outputs and gradients of a copy and of an average of weights beside those of the model; changes that it sees."""
    rank = dist.get_rank()
    inner = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    gaps = []
    transports = [{"transport": name} for name in ("shared_memory", "allgather", "auto")]
    for options in ({}, {"tokens": "sharded", "tp_mesh": inner}, *transports, {"etp": "etp"}):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("etp", "ep")) if "etp" in options else inner
        model = spread(mesh, **options)
        torch.manual_seed(rank if "tokens" not in options else 0)
        x = torch.randn(2, 6, DIM)
        model(x)[1].backward()
        model.zero_grad()
        twin, average = copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model)
        average.update_parameters(model)
        outs = [module(x)[0] for module in (model, twin, average)]
        for out in outs:
            out.square().sum().backward()
        gaps += [float((out - outs[0]).detach().abs().max()) for out in outs[1:]]
        for other in (twin, average.module):
            for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
                assert p is not q
                assert p.grad is not None, name
                assert q.grad is not None, name
                one, two = (g.to_local() if isinstance(g, DTensor) else g for g in (p.grad, q.grad))
                gaps.append(float((one - two).abs().max()))
                assert one.data_ptr() != two.data_ptr()
    torch.nn.utils.parametrize.register_parametrization(twin.layers[0]["moe"].experts, "gate_up", torch.nn.Identity())
    gaps.append(float((twin(x)[0] - outs[1]).detach().abs().max()))
    return gaps


def test_copies_have_weights_of_their_own_and_meet_the_same_ranks() -> None:
    for gaps in run_ranks(copies_on_rank, 2):
        assert len(gaps) > 20
        assert all(gap == 0 for gap in gaps)


def turned_on_rank() -> list[str]:
    turned = DeviceMesh("cpu", torch.tensor([1, 0]), mesh_dim_names=("ep",))
    rows = DeviceMesh("cpu", torch.tensor([[1], [0]]), mesh_dim_names=("edp", "ep"))
    right = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    tries = {
        "experts": lambda: spread(turned),
        "tp": lambda: spread(right, tokens="sharded", tp_mesh=turned),
        "dp": lambda: ddp(spread(right), turned, init_device_mesh("cpu", (1, 2), mesh_dim_names=("edp", "ep"))["edp"]),
        "edp": lambda: ddp(spread(rows["ep"]), right, rows["edp"]),
    }
    said = []
    for attempt in tries.values():
        with pytest.raises(ConfigError) as caught:
            attempt()
        said.append(str(caught.value))
    return said


def test_a_mesh_whose_ranks_do_not_ascend_is_refused() -> None:
    """torch sorts the ranks of a group: experts would be cut by place in the mesh, and looked for by rank."""
    for said in run_ranks(turned_on_rank, 2, deadline=60.0):
        for name, text in zip(("expert mesh", "tp_mesh", "dp_mesh", "edp_mesh"), said, strict=True):
            assert text.startswith(f"{name}: along dim 0 of [")
            assert "the ranks are [1, 0], but their group is [0, 1]: torch sorts it" in text


def swapped_on_rank() -> str:
    """Two of four ranks are in each other's place: the others, who are in their own, must not go on alone."""
    with pytest.raises(ConfigError) as caught:
        spread(DeviceMesh("cpu", [0, 2, 1, 3], mesh_dim_names=("ep",)))
    right = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("edp", "ep"))
    spread(right["ep"])
    return str(caught.value)


@pytest.mark.xdist_group("ranks4")
def test_all_ranks_of_a_line_refuse_it() -> None:
    assert all("ranks are [0, 2, 1, 3]" in said for said in run_ranks(swapped_on_rank, 4, deadline=60.0))
