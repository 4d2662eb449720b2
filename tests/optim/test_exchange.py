"""Matrices that are cut by a mesh: parameters and state have the bits of one process, whole experts send nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from helpers.optim_ranks import LAYOUTS, Run, differing, resumed, under_layouts
from helpers.optim_ranks import stepped as stepped_alone
from helpers.ranks import run_ranks
from trimtab.errors import ConfigError, InputError
from trimtab.optim import Muon
from trimtab.optim.exchange import cuts_of, local_gradient
from trimtab.parallel.meshes import local_part

DTYPES: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}), (torch.bfloat16, {}), (torch.bfloat16, {"low_bits": True}),
]  # fmt: skip
SILENT = {"ep 2", "ddp"}
"""Layouts in which every matrix is whole on a rank."""


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("dtype", "options"), DTYPES, ids=["fp32", "bf16", "low bits"])
def test_every_layout_has_the_bits_of_one_process(ranks: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    for found in run_ranks(under_layouts, ranks, tuple(LAYOUTS[ranks]), dtype, options, deadline=240.0):
        assert [(name, wrong) for name, (wrong, _) in found.items() if wrong] == []
        assert {name for name, (_, sent) in found.items() if not sent} == SILENT & set(found)
        # Nine kinds of matrices; two exchanges for each mesh dim that cuts.
        assert max(sent for _, sent in found.values()) <= 2 * 9 * 2


PAIRS = {
    2: (("fsdp, dim 1", "ep 2"), ("ep 2", "fsdp, dim 0"), ("etp 2", "ddp"), ("tp 2", "fsdp, dim 2")),
    4: (("fsdp 4, dim 0", "ep 2 x etp 2"), ("ep 2, hsdp", "tp 2 x fsdp 2")),
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("dtype", "options"), [DTYPES[0], DTYPES[2]], ids=["fp32", "low bits"])
def test_a_run_goes_on_under_another_layout(
    ranks: int, dtype: torch.dtype, options: dict[str, Any], tmp_path: Path
) -> None:
    for wrong in run_ranks(resumed, ranks, PAIRS[ranks], tmp_path, dtype, options, deadline=240.0):
        assert wrong == []


def refused() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    said = []
    for placement, shape in ((Partial(), (4, 8)), (_StridedShard(0, split_factor=2), (6, 8))):
        param = DTensor.from_local(torch.zeros(shape), mesh, [placement], run_check=False, shape=(6, 8), stride=(8, 1))
        with pytest.raises(ConfigError) as error:
            cuts_of("some.weight", param)
        said.append(str(error.value))
    param = nn.Parameter(DTensor.from_local(torch.zeros(3, 8), mesh, [Shard(0)]))
    param.grad = DTensor.from_local(torch.zeros(6, 8), init_device_mesh("cpu", (1, 2)), [Replicate(), Replicate()])
    with pytest.raises(InputError) as raised:
        local_gradient("some.weight", param)
    return [*said, str(raised.value)]


def cut_again() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    placements = [_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=2)]
    packed = DTensor.from_local(torch.zeros(4, 8), mesh, placements, run_check=False, shape=(16, 8), stride=(8, 1))
    with pytest.raises(ConfigError) as error:
        cuts_of("some.weight", packed)
    return str(error.value)


def test_fsdp_over_a_packed_projection_of_tp_is_refused() -> None:
    """FSDP2 cuts [gate share; up share] in two, and says of it what would be a part of each."""
    assert "no mesh dim before may share that dim out" in run_ranks(cut_again, 4)[0]


def summed() -> list[bool]:
    """Of a norm under sequence parallel: its gradient is Partial, and AdamW's step is that of the sum."""
    mesh = init_device_mesh("cpu", (2,))
    rank = mesh.get_local_rank()
    norm, whole = nn.LayerNorm(8), nn.LayerNorm(8)
    parallelize_module(norm, mesh, SequenceParallel())
    shares = torch.arange(16.0).view(2, 8)
    for name, true in whole.named_parameters():
        param, true.grad = norm.get_parameter(name), shares.sum(0)
        param.grad = DTensor.from_local(shares[rank], mesh, [Partial()])
    Muon(norm).step()
    Muon(whole).step()
    return [
        torch.equal(p.full_tensor(), norm_p) for p, norm_p in zip(norm.parameters(), whole.parameters(), strict=True)
    ]


def test_partial_gradients_are_summed() -> None:
    assert run_ranks(summed, 2) == [[True, True]] * 2


def all_adamw() -> list[str]:
    """What differs from one process where plain parameters and DTensors are in one group."""
    options: dict[str, Any] = {"layouts": {"*": None}}
    run = Run(LAYOUTS[2]["ep 2"], torch.float32, **options)
    for number in (1, 2, 3):
        run.step(number)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        torch.optim.AdamW(run.model.parameters(), fused=True).step()
    return differing(run.whole(), stepped_alone(torch.float32, **options))


def test_fused_adamw_takes_plain_parameters_and_dtensors() -> None:
    assert run_ranks(all_adamw, 2) == [[], []]


def test_what_is_not_known_is_refused_by_name() -> None:
    partial, strided, gradient = run_ranks(refused, 2)[0]
    assert partial.startswith("some.weight is P")
    assert partial.endswith("Muon takes what is sharded or whole")
    assert "must cut equally" in strided
    assert gradient.startswith(
        "the gradient of some.weight is (Replicate(), Replicate()), the parameter (Shard(dim=0),)"
    )


LACKING = "layers.1.o_proj.weight"


def stepped(layout: str, who: tuple[int, ...], lacking: str) -> Any:
    """What a step says where these ranks have no gradient of a parameter; whether it moved, where it says nothing."""
    run = Run(LAYOUTS[dist.get_world_size()][layout], torch.float32)
    (param,) = (p for name, p in run.model.named_parameters() if name.removeprefix("module.") == lacking)
    before = local_part(param).detach().clone()

    def hook(*_: Any) -> None:
        if dist.get_rank() in who:
            param.grad = None

    run.optimizer.register_step_pre_hook(hook)
    try:
        run.step(1)
    except InputError as error:
        return str(error)
    return not torch.equal(local_part(param), before)


@pytest.mark.parametrize(
    ("ranks", "layout", "who", "lacking"),
    [
        (2, "fsdp, dim 0", (1,), LACKING), (2, "tp 2", (0,), LACKING), (4, "tp 2 x fsdp 2", (2,), LACKING),
        (2, "etp 2", (0,), "layers.2.moe.experts.down"),
    ],
)  # fmt: skip
def test_a_rank_without_a_gradient_is_named_on_all(ranks: int, layout: str, who: tuple[int, ...], lacking: str) -> None:
    said = run_ranks(stepped, ranks, layout, who, lacking, deadline=60.0)
    assert {str(one).split(" has ")[0] for one in said} == {lacking}


def test_what_no_rank_has_a_gradient_of_stays() -> None:
    assert run_ranks(stepped, 2, "fsdp, dim 0", (0, 1), LACKING) == [False, False]
    assert run_ranks(stepped, 2, "ep 2", (0, 1), LACKING) == [False, False]
    assert run_ranks(stepped, 2, "ep 2", (1,), "layers.2.moe.experts.down") == [True, False], "nothing is cut"
