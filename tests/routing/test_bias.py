"""The expert bias: DeepSeek's sign rule, on loads of the global batch, counted once; and that it balances."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers.ranks import run_ranks
from trimtab.checkpoint.ranks import put_rank_state, rank_state
from trimtab.errors import ConfigError, InputError
from trimtab.moe import MoEConfig
from trimtab.routing.balance import max_vio, routers, set_totals, stepped_bias, update_bias
from trimtab.routing.config import BIAS_RULES, RouterConfig
from trimtab.routing.quantile import BINS, add_required, quantile_bias
from trimtab.routing.recompute import replay_in_recompute
from trimtab.routing.router import Router
from trimtab.routing.scores import SCORES

D, E, K = 8, 4, 2


class Stack(nn.Sequential):
    """MoE layers, one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x).y
        return x


def model(bias: bool = True, rule: Any = "sign") -> Stack:
    torch.manual_seed(0)
    c = RouterConfig(num_experts=E, top_k=K, score="sigmoid", bias=bias, bias_rule=rule, bias_rate=0.25)
    return Stack(*(MoEConfig(dim=D, hidden=4, router=c).build(f"{i}") for i in range(2)))


def test_the_sign_rule() -> None:
    bias = torch.tensor([0.5, 0.0, -0.5, 0.0])
    assert stepped_bias(bias, torch.tensor([9, 1, 5, 5]), 0.25).tolist() == [0.25, 0.25, -0.5, 0.0]
    assert stepped_bias(bias, torch.zeros(4, dtype=torch.int64), 0.25).tolist() == bias.tolist()


def test_loads_are_picks_of_real_tokens_summed_over_micro_batches_while_training() -> None:
    router = Router(RouterConfig(num_experts=E, top_k=K, bias=True, capacity_factor=0.3), D)
    x = torch.randn(10, D)
    mask = torch.rand(10) < 0.6
    expected = torch.zeros(E, dtype=torch.int64)
    for size in (10, 0, 4):
        router.config = RouterConfig(num_experts=E, top_k=K)
        picks = router.eval()(x[:size], token_mask_T=mask[:size]).ids_TK
        expected += torch.bincount(picks[picks >= 0], minlength=E)
        router.config = RouterConfig(num_experts=E, top_k=K, bias=True, capacity_factor=0.3)
        router.losses(router.train()(x[:size], token_mask_T=mask[:size]))
    assert router.take_loads().tolist() == expected.tolist()
    assert router.take_loads().tolist() == [0] * E


def test_totals_that_are_none_are_refused() -> None:
    m = model()
    for tokens in (-1, float("nan"), "8", torch.ones(2), None):
        with pytest.raises(InputError, match="must be the number of the step's tokens"):
            set_totals(m, tokens)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"counts of \['0'\], but the routers are \['0.router', '1.router'\]"):
        set_totals(m, 8, {"0": torch.ones(E)})
    with pytest.raises(ConfigError, match="no Router in Linear"):
        set_totals(nn.Linear(2, 2), 8)
    assert all(router.totals is None for router in routers(m).values())


def test_update_moves_every_bias_and_ends_the_step() -> None:
    m = model()
    for layer in m:
        layer(torch.randn(20, D))
    loads = update_bias(m)
    assert list(loads) == ["0.router", "1.router"]
    for name, router in routers(m).items():
        assert loads[name].sum() == 20 * K
        assert router.expert_bias.tolist() == stepped_bias(torch.zeros(E), loads[name], 0.25).tolist()
    assert all((load == 0).all() for load in update_bias(m).values())
    for layer in model(bias=False):
        layer(torch.randn(20, D))
        assert update_bias(layer)["router"].sum() == 20 * K
    with pytest.raises(ConfigError, match="no Router"):
        update_bias(nn.Linear(2, 2))


def test_weights_and_gradients_do_not_see_the_bias() -> None:
    router = Router(RouterConfig(num_experts=E, top_k=E, score="sigmoid", bias=True), D)
    x = torch.randn(5, D)
    plain = router(x)
    router.expert_bias.copy_(torch.tensor([3.0, 1.0, 2.0, 0.0]))
    biased = router(x)
    assert biased.ids_TK.tolist() == [[0, 2, 1, 3]] * 5
    by_expert = [r.weights_TK.gather(1, r.ids_TK.argsort(1)) for r in (plain, biased)]
    assert torch.equal(*by_expert)
    assert "expert_bias" in router.state_dict()
    assert len(router.state_dict()) == 2


@pytest.mark.parametrize("assign", [False, True])
def test_a_bias_of_another_dtype_is_loaded_into_float32(assign: bool) -> None:
    saved = {name: t.bfloat16() for name, t in model().state_dict().items()}
    with torch.device("meta"):
        m = model() if assign else None
    m = m or model()
    m.load_state_dict(saved, assign=assign)
    for router in routers(m).values():
        router.expert_bias.fill_(0.75)
        router.losses(router(torch.randn(20, D, dtype=router.weight.dtype)))
    update_bias(m)
    for router in routers(m).values():
        assert router.expert_bias.dtype == torch.float32
        assert (router.expert_bias != 0.75).any()


def skewed(tokens: int, seed: int = 0) -> Tensor:
    """Tokens that two experts of `router_of` like."""
    return torch.randn(tokens, D, generator=torch.Generator().manual_seed(seed)) + 1


def router_of(**options: Any) -> Router:
    router = Router(RouterConfig(num_experts=8, top_k=K, bias=True, **options), D)
    with torch.no_grad():
        router.weight.copy_(torch.randn(8, D, generator=torch.Generator().manual_seed(1)) / 2)
        router.weight[:2] += 0.4
    return router


def counted(scores_TE: Tensor, bias_E: Tensor, real_T: Tensor | None = None) -> Tensor:
    histogram = torch.zeros(8, BINS, dtype=torch.int64)
    add_required(histogram, scores_TE, bias_E, K, real_T)
    return histogram


@pytest.mark.parametrize("tokens", [4096, 64])
def test_the_quantile_is_that_of_what_tokens_require(tokens: int) -> None:
    """Sorted, here."""
    scores, bias = skewed(tokens).sigmoid(), torch.linspace(-0.3, 0.4, 8)
    cutoff = (scores + bias).sort(dim=1, descending=True).values[:, K]
    solved = (cutoff[:, None] - scores).sort(dim=0).values[round(tokens * K / 8) - 1]
    width = (0.7 + 2) / BINS
    found = quantile_bias(counted(scores, bias), bias, K)
    torch.testing.assert_close(found, solved - solved.mean(), rtol=0, atol=2 * width)


def test_parts_are_summed_exactly_and_masked_tokens_left_out() -> None:
    scores, bias = skewed(100).sigmoid(), torch.linspace(0, 1, 8)
    real = torch.arange(100) % 3 > 0
    parts = [counted(scores[a:b], bias, real[a:b]) for a, b in ((0, 40), (40, 40), (40, 100))]
    whole = counted(scores[real], bias)
    assert torch.equal(sum(parts), whole)
    assert whole.sum() == int(real.sum()) * 8
    assert torch.equal(quantile_bias(torch.zeros_like(whole), bias, K), bias), "no tokens, no change"


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_the_quantile_rule_balances_skewed_tokens(score: str) -> None:
    """In a few steps, of two micro-batches with masks; recomputed tokens require nothing a second time."""
    router, mask = router_of(score=score, bias_rule="quantile"), torch.arange(3000) % 5 > 0
    vio = []
    for step in range(6):
        before = router.expert_bias.clone()
        wanted = torch.zeros(8, BINS, dtype=torch.int64)
        for micro in range(2):
            x = skewed(3000, 2 * step + micro)
            checkpoint(
                lambda x: sum(router.losses(router(x, token_mask_T=mask)).values(), x.sum()),
                x.requires_grad_(), use_reentrant=False, context_fn=replay_in_recompute,
            ).backward()  # fmt: skip
            add_required(wanted, SCORES[score].of(x.detach() @ router.weight.T), before, K, mask)
        (loads,) = update_bias(router).values()
        assert loads.sum() == 2 * K * mask.sum()
        assert torch.equal(router.expert_bias, quantile_bias(wanted, before, K))
        vio.append(max_vio(loads))
    assert vio[0] > 1.5
    assert max(vio[2:]) < 0.5, vio
    bias = router.expert_bias.clone()
    update_bias(router.eval())
    assert torch.equal(router.expert_bias, bias), "no tokens, no change"


def test_what_tokens_require_is_counted_in_graphs_and_saved_in_the_middle_of_a_step() -> None:
    torch.compiler.reset()
    plain, compiled, other = (router_of(bias_rule="quantile") for _ in range(3))
    run = torch.compile(lambda x: compiled.losses(compiled(x)), backend="aot_eager", fullgraph=True)
    for seed in range(2):
        plain.losses(plain(skewed(300, seed)))
        run(skewed(300, seed))
    other.losses(other(skewed(7)))
    put_rank_state(other, rank_state(compiled))
    for router in (plain, compiled, other):
        update_bias(router)
        assert torch.equal(router.expert_bias, plain.expert_bias)
    assert plain.expert_bias.any()


def test_what_the_quantile_rule_cannot_balance_is_refused() -> None:
    for wrong in ({"bias": False}, {"score": "sqrtsoftplus"}, {"top_k": E}, {"groups": 2}):
        with pytest.raises(ConfigError, match="bias_rule='quantile'"):
            RouterConfig(**{"num_experts": E, "top_k": 1, "bias": True, "bias_rule": "quantile"} | wrong)
    with pytest.raises(ConfigError, match="bias_rule='signs' is not one of"):
        RouterConfig(num_experts=E, top_k=K, bias=True, bias_rule="signs")  # type: ignore[arg-type]


def on_ranks(rule: str) -> tuple[list[list[float]], list[list[int]]]:
    """Uneven tokens, none on the last rank; under DDP, which hands rank 0's buffers to the others."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    m = model(rule=rule)
    wrapped = nn.parallel.DistributedDataParallel(m)
    for step in range(2):
        for micro in range(2):
            g = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            x = torch.randn(0 if rank == ranks - 1 > 0 else 3 + 4 * rank, D, generator=g)
            wrapped(x)
        loads = update_bias(m, dist.group.WORLD)
    return [r.expert_bias.tolist() for r in routers(m).values()], [load.tolist() for load in loads.values()]


def in_one_process(ranks: int, rule: str) -> tuple[list[list[float]], list[list[int]]]:
    m = model(rule=rule)
    for step in range(2):
        for micro in range(2):
            for rank in range(ranks):
                g = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
                x = torch.randn(0 if rank == ranks - 1 > 0 else 3 + 4 * rank, D, generator=g)
                m(x)
        loads = update_bias(m)
    return [r.expert_bias.tolist() for r in routers(m).values()], [load.tolist() for load in loads.values()]


@pytest.mark.parametrize("rule", BIAS_RULES)
def test_loads_are_those_of_the_global_batch(rule: str) -> None:
    assert run_ranks(on_ranks, 3, rule) == [in_one_process(3, rule)] * 3


def test_max_vio() -> None:
    assert max_vio(torch.tensor([4, 0, 0, 0])) == 3.0
    assert max_vio(torch.tensor([2, 2])) == 0.0
    assert max_vio(torch.tensor([0, 0])) == 0.0
