"""Ranks that share F watch over each other: who is late or in another call is named; healthy ones sync once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from helpers.layout_truth import D, E, F, K
from helpers.ranks import run_ranks
from trimtab.errors import PhaseTimeout
from trimtab.moe import MoEConfig
from trimtab.parallel.expert_parallel import ExpertParallel, parallelize
from trimtab.routing.config import RouterConfig

READS = ("tolist", "item", "cpu", "numpy", "__int__", "__float__", "__bool__", "__index__")
"""Ways to read a tensor on the host."""


def layers() -> nn.ModuleList:
    """Two layers over an etp group of both ranks, which have met. Its own group, for the exchange that never ends."""
    torch.manual_seed(0)
    config = MoEConfig(dim=D, hidden=F, router=RouterConfig(num_experts=E, top_k=K), bias=True)
    model = nn.ModuleList(config.build() for _ in range(2))
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    mesh = DeviceMesh.from_group(
        [dist.new_group([0, 1]), alone], "cpu", mesh=torch.tensor([[0], [1]]), mesh_dim_names=("etp", "ep")
    )
    parallelize(model, mesh, {"*": ExpertParallel(etp="etp")})
    assert model[0].experts.etp.guard is model[1].experts.etp.guard
    forward(model[0]).sum().backward()
    dist.barrier()
    return model


def forward(layer: nn.Module) -> Tensor:
    out: Tensor = layer(torch.randn(3 + dist.get_rank(), D, requires_grad=True)).y
    return out


def late_on_rank() -> list[str]:
    """Rank 1 stays away from a forward, then from a backward: what is said on rank 0 of each, with fresh groups."""
    said = []
    for when in ("forward", "backward"):
        model = layers()
        if when == "backward":
            y = forward(model[1])
        model[0].experts.etp.guard.deadline = 1.5  # what both came to before may take longer on a busy machine
        dist.barrier()
        if dist.get_rank() == 0:
            with pytest.raises(PhaseTimeout) as raised:
                (forward(model[1]) if when == "forward" else y).sum().backward()
            said.append(f"{raised.value.ranks} {raised.value}")
        dist.barrier()  # where rank 1 waits meanwhile
    return said


def test_a_late_rank_is_named_forward_and_backward() -> None:
    (forward_said, backward_said), _ = run_ranks(late_on_rank, 2, deadline=60.0)
    for said, turn in ((forward_said, "count forward"), (backward_said, "combine backward")):
        assert said.startswith("(1,) [layer ")
        assert f"Rank 0 was waiting in {turn} of layer 1.experts, call 0" in said


def syncs_on_rank() -> list[tuple[int, int]]:
    """How often (forward, backward) read something back from a device: over etp, and with all of F here."""
    plain = MoEConfig(dim=D, hidden=F, router=RouterConfig(num_experts=E, top_k=K), bias=True).build()
    forward(plain)  # the kernels' self-test reads, too
    reads, found = [0], []

    def counting(exact: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
        def call(t: Tensor) -> object:
            reads[0] += 1
            return exact(t)

        return call

    for layer in (layers()[0], plain):
        with pytest.MonkeyPatch.context() as patch:
            for name in READS:
                patch.setattr(Tensor, name, counting(getattr(Tensor, name)))
            start = reads[0]
            y = forward(layer)
            between = reads[0]
            y.sum().backward()
            found.append((between - start, reads[0] - between))
    return found


def test_one_sync_forward_and_none_backward() -> None:
    for (forwards, backwards), (own_forwards, own_backwards) in run_ranks(syncs_on_rank, 2):
        assert (forwards - own_forwards, backwards - own_backwards) == (1, 0)
