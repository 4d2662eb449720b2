"""`router="trimtab"`: Megatron's parameters and log, the losses of the global batch, for any number of tokens.

Legend: T tokens of a rank, N tokens of all ranks, E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.megatron_case import (
    EXPERTS,
    Case,
    Route,
    config_of,
    errors,
    input_of,
    layer_of,
    run_layer,
    top_k,
    truth,
    weights,
)
from helpers.megatron_cpu import VERSION, megatron_ranks, moe_utils, parallel_state
from trimtab.errors import ConfigError
from trimtab.integrations.megatron.router import router_config

SCALE = 0.25
"""What Megatron multiplies the losses' gradients by, as its schedules do for micro-batches and loss scaling."""
NAMES = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
NAMES["global_aux_loss"] = "global_load_balancing_loss"
COEFFICIENTS = {"aux_loss": 0.3, "seq_aux_loss": 0.2, "global_aux_loss": 0.4}
LOSSES = {
    "moe_router_load_balancing_type": list(COEFFICIENTS), "moe_aux_loss_coeff": list(COEFFICIENTS.values()),
    "moe_z_loss_coeff": 0.05,
}  # fmt: skip
OURS = Case(tokens=[(6, 2)], use={"router": "trimtab"}, options=LOSSES)
TOKENS = {
    "balanced": replace(OURS, tokens=[(6, 2)]),
    "uneven": replace(OURS, tokens=[(6, 2), (3, 1), (1, 1), (4, 3)]),
    "none on a rank": replace(OURS, tokens=[(6, 2), (0, 1), (3, 1), (5, 1)]),
    "none on a rank, two micro-batches": replace(OURS, tokens=[(6, 2), (0, 1), (3, 1), (5, 1)], steps=2),
    "none anywhere": replace(OURS, tokens=[(0, 1)]),
    "padding alone on a rank": replace(OURS, tokens=[(6, 2), (3, 1)], padding=[0.5, 1.0]),
    "recomputed": replace(
        OURS, tokens=[(6, 2), (0, 1)],
        options=LOSSES | {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ),
}  # fmt: skip


def step(cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    """As `run_layer`, with Megatron's log, and the gradient of the router reduced as Megatron does, by case."""
    found = {}
    scaler = moe_utils.MoEAuxLossAutoScaler
    for name, case in cases.items():
        by_token = case.options.get("calculate_per_token_loss", False)
        scaler.main_loss_backward_scale = torch.tensor([SCALE * (1 if by_token else case.sizes.get("cp", 1))])
        answer = run_layer(case)
        grad = answer["router"].clone()
        dist.all_reduce(grad)  # summed over tp, averaged over dp and cp; or summed, if tokens divide it later
        answer["reduced"] = grad if by_token else grad / parallel_state.get_data_parallel_world_size(True)
        answer["log"] = log()
        found[name] = answer
    return found


def log() -> dict[str, float]:
    """What Megatron would print of layer 1: summed over tp and cp, averaged over dp. Begins anew."""
    if VERSION < (0, 18):
        entries = moe_utils.get_moe_layer_wise_logging_tracker()
        values = {name: entries[name]["values"][0].clone() for name in sorted(entries)}
        entries.clear()
    else:
        logging = import_module("megatron.core.transformer.moe.moe_logging")
        metrics = logging.get_moe_metrics_tracker().metrics
        values = {name: metrics[name].values[0].clone() for name in sorted(metrics)}
        logging.destroy_moe_metrics_tracker()
    for value in values.values():
        dist.all_reduce(value, group=parallel_state.get_tensor_and_context_parallel_group())
        dist.all_reduce(value, group=parallel_state.get_data_parallel_group())
    return {name: float(v) / parallel_state.get_data_parallel_world_size() for name, v in values.items()}


def true_losses(case: Case, ranks: int, route: Route = top_k, cut: int = 1) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Each loss of each micro-batch without its coefficient, over all ranks; how many tokens each had. Differentiable
    in `router`, whose leaf comes with them. cut: how many ranks in turn have positions of the same sequences."""
    router = weights(case)["router"].requires_grad_()
    by_step, counts, so_far = [], [], torch.zeros(EXPERTS, dtype=torch.float64)
    for s in range(case.steps):
        sequences: dict[tuple[int, int], list[Tensor]] = {}
        for rank in range(ranks):
            given = input_of(case, rank, s)
            for b in range(given.x_SBH.shape[1]):
                real = slice(None) if given.padding_BS is None else ~given.padding_BS[b]
                x = given.x_SBH[:, b][real].double()
                sequences.setdefault((rank // cut, b), []).append(x @ router.T)
        logits = [torch.cat(parts) for parts in sequences.values()] or [router[:0, :0].expand(0, EXPERTS)]
        every = torch.cat(logits)
        chosen = [torch.nn.functional.one_hot(route(each)[0], EXPERTS).double().sum(1) for each in logits]
        n, count = every.shape[0], torch.cat(chosen).sum(0)
        so_far = so_far + count
        p = every.softmax(1)

        def balance(of_E: Tensor, p: Tensor = p, n: int = n) -> Tensor:
            return EXPERTS / max(n, 1) * (of_E / of_E.sum().clamp(min=1) * p).sum()

        per_sequence = [
            EXPERTS / max(n, 1) * (c.sum(0) / c.sum().clamp(min=1) * each.softmax(1)).sum()
            for c, each in zip(chosen, logits, strict=True)
        ]
        by_step.append({
            "aux_loss": balance(count), "seq_aux_loss": torch.stack(per_sequence).sum(),
            "global_aux_loss": balance(so_far), "z_loss": every.logsumexp(1).square().sum() / max(n, 1),
        })  # fmt: skip
        counts.append(n)
    return [{"leaf": router, **losses} for losses in by_step], torch.tensor(counts)


def check(cases: dict[str, Case], world: int, bound: float = 1e-5) -> None:
    sizes = next(iter(cases.values())).sizes
    answers = megatron_ranks(step, world, cases, **sizes)
    cut = sizes.get("tp", 1) * sizes.get("cp", 1)
    for name, case in cases.items():
        got = [answer[name] for answer in answers]
        off = errors(replace(case, frozen=("router",)), got)
        assert max(off[kind] for kind in ("y", "up", "down")) < bound, (name, off)  # the losses reach dx too
        main = errors_of_router(case, got)
        by_step, counts = true_losses(case, world, cut=cut)
        wanted = {kind: sum(float(losses[kind]) for losses in by_step) for kind in (*COEFFICIENTS, "z_loss")}
        coefficients = COEFFICIENTS | {"z_loss": 0.05}
        by_token = case.options.get("calculate_per_token_loss", False)
        total = torch.zeros_like(main)
        for losses, n in zip(by_step, counts, strict=True):
            loss = sum(coefficients[kind] * losses[kind] for kind in coefficients) * (n if by_token else 1)
            if n:
                (grad,) = torch.autograd.grad(loss, by_step[0]["leaf"], retain_graph=True)
                total = total + SCALE * grad
        main = main if by_token else main / (world // sizes.get("tp", 1))
        for answer in got:
            wrong = float((answer["reduced"].double() - main - total).abs().max() / max(1.0, float(total.abs().max())))
            assert wrong < bound, (name, wrong)
            for kind, value in wanted.items():
                logged = answer["log"][NAMES.get(kind, kind)]
                assert abs(logged - value) < bound * max(1.0, value), (name, kind, logged, value)


def errors_of_router(case: Case, answers: list[dict[str, Any]]) -> Tensor:
    """The router's gradient without losses, summed over all ranks."""
    kept = [answer["kept"][: case.steps] for answer in answers]
    total: Tensor = sum(truth(case, kept)["router"])  # type: ignore[assignment]
    return total


def over(**sizes: int) -> dict[str, Case]:
    return {name: replace(case, sizes=sizes) for name, case in TOKENS.items()}


def test_losses_are_those_of_the_global_batch_on_two_data_parallel_ranks() -> None:
    check(over(ep=2), 2)


def test_losses_divided_by_tokens_later_are_weighted_by_tokens() -> None:
    cases = {name: replace(c, options=c.options | {"calculate_per_token_loss": True}) for name, c in over(ep=2).items()}
    check(cases, 2)


@pytest.mark.megatron_full
@pytest.mark.parametrize(
    ("world", "sizes"), [(2, {"tp": 2, "ep": 2}), (2, {"cp": 2}), (4, {"tp": 2, "ep": 2}), (4, {"cp": 2, "ep": 4})]
)
def test_losses_are_those_of_the_global_batch_where_sequences_are_cut(world: int, sizes: dict[str, int]) -> None:
    whole = {name: case for name, case in over(**sizes).items() if name in ("balanced", "none anywhere")}
    check(whole, world)


DECISIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax before": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "sigmoid, bias": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    "sigmoid of one": {"moe_router_score_function": "sigmoid", "moe_router_topk": 1},
    "groups": {
        "moe_router_score_function": "sigmoid", "moe_router_num_groups": 4, "moe_router_group_topk": 2,
        "moe_router_topk": 4, "moe_router_enable_expert_bias": True,
    },
    "groups by the best": {
        "moe_router_pre_softmax": True, "moe_router_num_groups": 4, "moe_router_group_topk": 2,
    },
    "capacity": {"moe_expert_capacity_factor": 0.5},
    "losses": LOSSES,
    "losses of sigmoid": LOSSES | {"moe_router_score_function": "sigmoid"},
}  # fmt: skip
if VERSION >= (0, 19):  # before, its loss per sequence is divided by their number once too often there
    DECISIONS["losses divided by tokens"] = LOSSES | {"calculate_per_token_loss": True}


def routed(router: str, options: dict[str, Any], state: Any = None) -> dict[str, Any]:
    """A layer's output and gradients, with Megatron's router or ours; on one rank, where both take the same losses."""
    case = Case(tokens=[(6, 2)], use={"router": router}, options=options)
    layer = layer_of(case)
    if state is not None:
        layer.load_state_dict(state)
    elif layer.router.expert_bias is not None:
        layer.router.expert_bias.copy_(torch.linspace(-0.3, 0.3, EXPERTS))
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor([SCALE])
    answer = run_layer(case, layer)
    counts = layer.router.local_tokens_per_expert
    return {
        **{name: answer[name] for name in ("y", "dx", "router", "up", "down")}, "log": log(),
        "state": {name: value for name, value in layer.state_dict().items() if isinstance(value, Tensor)},
        "flags": vars(layer.router.weight), "counts": None if counts is None else counts.clone(),
    }  # fmt: skip


def both_routers() -> dict[str, Any]:
    found = {}
    for name, options in DECISIONS.items():
        theirs = routed("megatron", options)
        found[name] = theirs, routed("trimtab", options, theirs["state"])
    return found


def test_decision_losses_and_state_are_those_of_megatron_on_one_rank() -> None:
    (found,) = megatron_ranks(both_routers, 1)
    for name, (theirs, ours) in found.items():
        assert theirs["state"].keys() == ours["state"].keys(), name
        assert theirs["flags"] == ours["flags"]
        assert theirs["log"].keys() == ours["log"].keys()
        if theirs["counts"] is not None:
            assert torch.equal(theirs["counts"], ours["counts"]), name
        values = zip(_leaves(theirs), _leaves(ours), strict=True)
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in values), name


def _leaves(answer: dict[str, Any]) -> list[Tensor]:
    lists = [answer[name] for name in ("y", "dx", "up", "down")]
    return [answer["router"], *(t for ts in lists for t in ts), torch.tensor(list(answer["log"].values()))]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"add_bias_linear": True}, "a bias on the router's logits"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type='sinkhorn'"),
        ({"moe_router_force_load_balancing": True}, "random logits"),
        ({"moe_router_num_groups": 4, "moe_router_group_topk": 1, "moe_router_topk": 2}, "sums of logits"),
    ],
)
def test_what_our_router_does_not_have_is_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        router_config(config_of(Case(tokens=[], options=options)), {})
