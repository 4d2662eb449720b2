"""Our dispatcher in torchtitan's own layer, against torchtitan's dispatcher and against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from helpers.cases import case
from helpers.comparing import assert_close
from helpers.ranks import run_ranks
from helpers.routed import D, E, K, Share, run, truth
from trimtab.parallel.meshes import local_part

pytest.importorskip(
    "torchtitan.models.common.token_dispatcher", reason="torchtitan is not a dependency and is not installed"
)

FALLS = ("random", "hot", "cold_rank", "empty_source", "ragged", "empty_world", "one_token")
BOUND = 2e-6


def dispatchers(ranks: int) -> dict[str, Any]:
    """Theirs and ours, from their configs, wired as `RoutedExperts.parallelize` wires them."""
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    from trimtab.integrations.torchtitan import TokenDispatcher

    set_spmd_backend("partial_dtensor")  # Gloo refuses the all-to-all of its other backend where splits differ
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",)) if ranks > 1 else None
    configs = {
        "theirs": AllToAllTokenDispatcher.Config(num_experts=E, top_k=K),
        "ours": TokenDispatcher.Config(num_experts=E, top_k=K),
        "ordered": TokenDispatcher.Config(num_experts=E, top_k=K, combine="ordered"),
    }
    made = {name: config.build() for name, config in configs.items()}
    for dispatcher in made.values():
        dispatcher.wire_meshes(ep_mesh=mesh)
    return made


def share_of(pattern: str, rank: int, ranks: int) -> Share:
    """As a top-k chooses: no token an expert twice, for theirs counts such a token once."""
    x, _, w, _ = case(pattern, rank, ranks, E, K, D, torch.float32, seed=len(pattern))
    g = torch.Generator().manual_seed(99 + rank)
    experts = E - E // ranks if pattern == "cold_rank" and ranks > 1 else E
    draw = torch.rand(x.shape[0], experts, generator=g)
    if pattern == "hot":  # every token chooses the last expert
        draw[:, -1] = -1
    return Share(x=x, scores=w, ids=draw.argsort(1)[:, :K].contiguous(), dy=torch.randn(x.shape, generator=g))


def beside_theirs() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    made = dispatchers(ranks)
    for pattern in FALLS:
        shares = [share_of(pattern, r, ranks) for r in range(ranks)]
        true = truth(shares, rank)
        theirs = run(made["theirs"], shares[rank], rank, ranks)
        for which in ("ours", "ordered"):
            for name, value in run(made[which], shares[rank], rank, ranks).items():
                assert_close(value, true[name], BOUND, f"{pattern} {which} {name}")
                assert_close(value, theirs[name].double(), BOUND, f"{pattern} {which} {name} against theirs")


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.xdist_group("ranks4"))])
def test_output_and_gradients_equal_theirs_and_the_oracle(ranks: int) -> None:
    run_ranks(beside_theirs, ranks)


def in_their_layer(tp: int, ep: int) -> None:
    from helpers.titan_layer import step

    theirs = step("theirs", tp, ep, "partial_dtensor")
    for which in ("sum", "ordered"):
        for name, value in step(which, tp, ep, "partial_dtensor").items():
            assert_close(value, theirs[name], BOUND, f"{which} {name}")
    if tp == dist.get_world_size():  # the other backend, which theirs cannot use on Gloo; its type checker on
        checked = step("sum", tp, ep, "spmd_types", checked=True)
        assert_close(checked["y"], theirs["y"], BOUND, "checked y")
        assert_close(checked["dx"], theirs["dx"], BOUND, "checked dx")


@pytest.mark.parametrize(
    ("ranks", "tp", "ep"),
    [(2, 1, 2), (2, 2, 2), pytest.param(4, 2, 4, marks=pytest.mark.xdist_group("ranks4")),
     pytest.param(4, 2, 2, marks=pytest.mark.xdist_group("ranks4"))],
)  # fmt: skip
def test_their_layer_computes_the_same_with_ours(ranks: int, tp: int, ep: int) -> None:
    """Sequence parallel over tp, experts over ranks of both: `parallelize` wires ours, all gradients agree."""
    run_ranks(in_their_layer, ranks, tp, ep)


def hot_experts_are_copied(tp: int, ep: int) -> None:
    from torchtitan.models.common import moe

    from helpers.titan_layer import step

    def in_their_dtype(self: Any, x_RD: torch.Tensor, counts_e: torch.Tensor) -> torch.Tensor:
        """Their own rounds to bfloat16, and a weight's gradient would be two rounded parts."""
        up, down, gate = (local_part(w) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        rows = x_RD.split(counts_e.tolist())
        assert len(rows) == up.shape[0]
        silu = torch.nn.functional.silu
        return torch.cat([(silu(x @ up[i].T) * (x @ gate[i].T)) @ down[i].T for i, x in enumerate(rows)])

    moe.GroupedExperts.forward = in_their_dtype  # in a process of its own
    theirs = step("theirs", tp, ep, "partial_dtensor")
    ours = step("replicated", tp, ep, "partial_dtensor")
    computed, replicas = ours.pop("computed"), ours.pop("replicas")
    assert int(replicas.sum()) > 0
    assert int(computed.amax()) <= -(-int(computed.sum()) // ep)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert_close(value, theirs[name], BOUND, name)


@pytest.mark.parametrize(
    ("ranks", "tp", "ep"), [(2, 1, 2), pytest.param(4, 2, 4, marks=pytest.mark.xdist_group("ranks4"))]
)
def test_their_layer_computes_the_same_with_copies(ranks: int, tp: int, ep: int) -> None:
    run_ranks(hot_experts_are_copied, ranks, tp, ep)


def test_an_override_copies_hot_experts_everywhere() -> None:
    from torchtitan.config.override import OverrideConfig, apply_overrides

    from helpers.titan_layer import config
    from trimtab.integrations.torchtitan import RoutedExperts, TokenDispatcher

    named = "trimtab.integrations.torchtitan.override.replicated_experts"
    cfg = config("theirs", 1)
    apply_overrides(OverrideConfig(imports=[(named, {"replicate_experts": 0.1, "copy_cost": 7})]), cfg)
    routed = cfg.routed_experts
    assert type(routed) is RoutedExperts.Config
    assert (routed.replicate_experts, routed.copy_cost) == (0.1, 7)
    assert routed.token_dispatcher == TokenDispatcher.Config(num_experts=E, top_k=K)
    built = cfg.build().routed_experts
    assert {name for name, _ in built.inner_experts.named_parameters()} == {"w1_EFD", "w2_EDF", "w3_EFD"}
    assert built.token_dispatcher.exchange.options.copy_cost == 7


def test_their_override_puts_ours_in_everywhere() -> None:
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.token_dispatcher import TorchAOTokenDispatcher

    from helpers.titan_layer import config
    from trimtab.integrations.torchtitan import TokenDispatcher

    wanted = OverrideConfig(
        imports=[("trimtab.integrations.torchtitan.override.token_dispatcher", {"combine": "ordered"})]
    )
    plain, padded = config("theirs", 1), config("theirs", 1)
    padded.routed_experts.token_dispatcher = TorchAOTokenDispatcher.Config(num_experts=E, top_k=K, pad_multiple=32)
    for cfg, pad in ((plain, 1), (padded, 32)):
        assert len(apply_overrides(wanted, cfg)) == 1
        assert cfg.routed_experts.token_dispatcher == TokenDispatcher.Config(
            num_experts=E, top_k=K, pad_multiple=pad, combine="ordered"
        )
        assert cfg.build().routed_experts.token_dispatcher.exchange.pad_multiple == pad


def test_compiling_breaks_the_graph_at_the_exchange() -> None:
    """The same numbers through torch.compile, and with fullgraph a message that says what to do."""
    from trimtab.integrations.torchtitan import TokenDispatcher

    dispatcher = TokenDispatcher.Config(num_experts=E, top_k=K).build()
    share = share_of("random", 0, 1)

    def layer(x: torch.Tensor) -> torch.Tensor:
        rows, _, sent = dispatcher.dispatch(x * 2, share.scores, share.ids, counts_E)
        return dispatcher.combine(rows * 3, sent, x) + 1

    counts_E = torch.bincount(share.ids.flatten(), minlength=E)
    assert_close(torch.compile(layer, backend="eager")(share.x), layer(share.x), BOUND, "compiled")
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"compile\.components loss"):
        torch.compile(layer, backend="eager", fullgraph=True)(share.x)
