"""Our Muon on Megatron's layer with our experts: each matrix against float64 Newton-Schulz of its own; and Megatron's
Muon, which takes gate and up of our experts apart."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.megatron_case import Case, layer_of
from helpers.megatron_cpu import VERSION, megatron_ranks, spec_utils
from helpers.optim_ranks import Matrices, newton_schulz, small, worst_error
from trimtab.integrations.megatron.experts import Experts
from trimtab.integrations.megatron.linears import grouped_mlp
from trimtab.optim.matrices import find_matrices


def layer(form: str) -> Any:
    forms = {
        "stacked": True, "grouped": grouped_mlp(),
        "each": spec_utils.ModuleSpec(module=Experts, params={"single_parameter": False}),
    }  # fmt: skip
    options: dict[str, Any] = {"moe_shared_expert_intermediate_size": 8}
    return layer_of(Case(tokens=((4, 1),), use={"experts": forms[form]}, options=options))


def matrices(made: Any) -> dict[str, Matrices]:
    """Gate and up of each expert in `linear_fc1`, as `Experts.forward` reads them."""
    found = {}
    for name, param in made.named_parameters():
        if ".linear_fc" in name and "shared" not in name:
            each = torch.arange(param.numel()).view(-1, *param.shape[-2:])
            found[name] = [part for where in each for part in where.chunk(1 + ("linear_fc1" in name))]
    return found


def stepped(form: str) -> tuple[float, set[str]]:
    """The worst error of an update; of what else looks like a matrix why it is not Muon's."""
    made = small(layer(form), torch.float64)
    truth, others = matrices(made), find_matrices(made)
    left = {f.what for p, f in others.items() if f.name not in truth and p.ndim == 2}
    return worst_error(made, truth, steps=1, ns_dtype=torch.float64), left


@pytest.mark.parametrize("form", ["stacked", "each", "grouped"])
def test_each_matrix_of_an_expert_is_orthogonalized_alone(form: str) -> None:
    ((worst, left),) = megatron_ranks(stepped, 1, form)
    assert worst <= 1e-12
    assert left == {"router", "of ColumnParallelLinear", "of RowParallelLinear"}, "said by name"


def megatrons() -> list[tuple[bool, float]]:
    """By its own code that takes a matrix apart, without the package that holds its iteration."""
    muon: Any = importlib.import_module("megatron.core.optimizer.emerging_optimizers").TensorParallelMuon
    own = SimpleNamespace(
        pg_collection=None, tp_mode="duplicated", split_qkv=True, is_qkv_fn=lambda p: getattr(p, "is_qkv", False),
        qkv_split_shapes=[3, 5], scaled_orthogonalize_fn_with_gtp_remat=lambda _, g, *__: newton_schulz(g),
    )  # fmt: skip
    made, found = layer("each"), []
    for name, each in matrices(made).items():
        param, grad = made.get_parameter(name), torch.randn(made.get_parameter(name).shape)
        right = torch.cat([newton_schulz(grad.flatten()[where]) for where in each])
        found.append((param.ndim == 2, float((muon.orthogonalize(own, param, grad) - right).norm())))
    return found


@pytest.mark.skipif(VERSION < (0, 19), reason="its Muon asks no parameter for the sizes of its parts")
def test_megatrons_muon_takes_gate_and_up_apart() -> None:
    (found,) = megatron_ranks(megatrons, 1)
    assert len(found) == 16
    assert all(matrix and error < 1e-12 for matrix, error in found)
