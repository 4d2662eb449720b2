"""The norm of all gradients, wherever they lie, and the factor by which they are clipped."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from helpers.comparing import relative_error
from helpers.expert_checks import clipped_by_one_factor
from helpers.layout_truth import build
from helpers.ranks import run_ranks
from trimtab.errors import ConfigError, InputError
from trimtab.parallel.expert_parallel import ExpertParallel, parallelize
from trimtab.parallel.grad_norm import clip_grad_norm_


def true_gradient(stage: int, name: str, shape: torch.Size) -> Tensor:
    g = torch.Generator().manual_seed(sum(map(ord, name)) + 7919 * stage)
    return torch.randn(shape, generator=g, dtype=torch.float64).float()


def stages_on_rank() -> dict[str, float]:
    """Two pipeline stages of two ranks, each with a model of its own over ep = 2; gradients are given."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    model, errors = build(torch.float32), {}
    stage: int = mesh.get_local_rank("pp")
    true: list[Tensor] = []
    for s in range(2):
        true += [true_gradient(s, name, p.shape).double() * (1 + 3 * s) for name, p in model.named_parameters()]
    parallelize(model, mesh["ep"], {"layers.*.moe": ExpertParallel()})
    for power in (2.0, 3.0, 1.0, float("inf")):
        for name, p in model.named_parameters():
            whole = true_gradient(stage, name, p.shape) * (1 + 3 * stage)
            cut = isinstance(p, DTensor)
            p.grad = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None) if cut else whole
        want = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in true]), power)
        options = {"norm_type": power, "pp_mesh": mesh["pp"]}
        errors[f"{power}"] = relative_error(clip_grad_norm_(model, 0.5, **options), want)
        clipped = clip_grad_norm_(model.parameters(), 1e9, **options)
        errors[f"{power} clipped"] = relative_error(clipped, torch.tensor(0.5, dtype=torch.float64))
    dist.barrier()
    return errors


@pytest.mark.xdist_group("ranks4")
def test_norms_over_pipeline_stages() -> None:
    for errors in run_ranks(stages_on_rank, 4):
        assert len(errors) == 8
        assert all(error <= 1e-6 for error in errors.values()), errors


def placements_on_rank() -> dict[str, float]:
    """Gradients that lie otherwise than their parameters, as torch's tensor parallelism leaves some."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    each = (Replicate(), Shard(0), Shard(1))
    ways = list(itertools.product(each, repeat=2))
    params, true = [], []
    for i, (param, grad) in enumerate(itertools.product(ways, ways)):
        whole = true_gradient(i, "placed", torch.Size((3, 5)))
        true.append(whole.double())
        params.append(torch.nn.Parameter(distribute_tensor(torch.zeros(3, 5), mesh, param)))
        params[-1].grad = distribute_tensor(whole, mesh, grad, src_data_rank=None)
    errors = {}
    for power in (2.0, 1.0, float("inf")):
        want = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in true]), power)
        errors[f"{power}"] = relative_error(clip_grad_norm_(params, 1e9, norm_type=power), want)
    clip_grad_norm_(params, 0.5)
    scale = 0.5 / torch.linalg.vector_norm(torch.stack(true))
    for param, whole in zip(params, true, strict=True):
        assert isinstance(param.grad, DTensor)
        errors[f"{param.placements} {param.grad.placements}"] = relative_error(param.grad.full_tensor(), whole * scale)
    other = init_device_mesh("cpu", (4,))
    params[0].grad = distribute_tensor(torch.ones(3, 5), other, (Shard(0),))
    for power in (0, -1.0, None):
        with pytest.raises(ConfigError, match="must be a number above 0"):
            clip_grad_norm_([], 1.0, norm_type=power)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="its parameter is not"):
        clip_grad_norm_(params, 1.0)
    return errors


@pytest.mark.xdist_group("ranks4")
def test_a_gradient_counts_once_wherever_it_lies() -> None:
    for errors in run_ranks(placements_on_rank, 4):
        assert len(errors) == 3 + 81
        assert all(error <= 1e-6 for error in errors.values()), errors


def test_one_parameter_may_be_given_alone() -> None:
    one, other = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    one.grad, other.grad = torch.arange(3.0), torch.arange(3.0)
    torch.testing.assert_close(clip_grad_norm_(one, 0.5), torch.nn.utils.clip_grad_norm_(other, 0.5))
    torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [0.37, 10_000.0])
def test_it_is_one_for_gradients_of_all_dtypes_and_is_rounded_once(dtype: torch.dtype, scale: float) -> None:
    clipped_by_one_factor("cpu", dtype, scale)
