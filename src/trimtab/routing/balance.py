"""The expert bias of aux-loss-free balancing (arXiv 2408.15664), or by quantiles, and loads over a whole model.

Legend: E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError, InputError
from trimtab.routing.losses import Groups, StepTotals, take_sums
from trimtab.routing.quantile import quantile_bias
from trimtab.routing.router import Router
from trimtab.validation import is_finite


def routers(model: nn.Module, needed_by: str = "") -> dict[str, Router]:
    """The routers of a model by module name, in the order of the layers.

    Raises ConfigError where it has none, and `needed_by` says who needs one.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, Router)}
    if needed_by and not found:
        raise ConfigError(f"no Router in {type(model).__name__}: {needed_by} is for models with trimtab's MoE layers")
    return found


def stepped_bias(bias_E: Tensor, loads_E: Tensor, rate: float) -> Tensor:
    """The bias after one step: + rate * sign(mean load - load). It joins the scores for the selection only."""
    loads = loads_E.double()
    return bias_E + rate * (loads.mean() - loads).sign().to(bias_E.dtype)


@torch.no_grad()
def update_bias(model: nn.Module, group: Groups = None) -> dict[str, Tensor]:
    """End an optimizer step: update every expert bias, forget the step's loads, and return them, global, by router.

    Loads are what the routers picked while training, summed over micro-batches; a recomputed forward is not counted
    again. Every rank of the group must call (one all-reduce for the whole model).

    Args:
        group: the ranks that hold the global batch, also those that route shares of the same tokens. None for those
            that the balance losses are summed over, `router.groups.everyone`, which `ddp`, `fully_shard_moe` and
            `join_data_parallel` set; where nobody has, this rank holds the global batch. () for this rank alone.

    Raises:
        ConfigError: the model has no router, or routers with several groups and none given.
    """
    found = routers(model, "update_bias")
    if group is None:
        group, *others = {router.groups.everyone for router in found.values()}
        if others:
            raise ConfigError("the routers' losses are summed over different ranks: hand in the `group` of the loads")
    # One row for each expert: its load, and for the quantile rule what tokens require.
    counted = {name: torch.cat([r.required(), r.take_loads()[:, None]], 1) for name, r in found.items()}
    loads = {}
    for name, sums in take_sums(counted, group).items():
        bias_E, c = found[name].expert_bias, found[name].config
        required_EH, loads[name] = sums[:, :-1], sums[:, -1].contiguous()
        if bias_E is not None and c.bias_rule == "quantile":
            bias_E.copy_(quantile_bias(required_EH, bias_E, c.top_k))
        elif bias_E is not None:
            bias_E.copy_(stepped_bias(bias_E, loads[name], c.bias_rate))
    return loads


def set_totals(model: nn.Module, tokens: float | Tensor, counts: dict[str, Tensor] | None = None) -> None:
    """Tell every router the totals of the coming step, whose micro-batches' losses are then added up, not averaged.

    They hold until others are set; `router.totals = None` takes one's back.

    Args:
        tokens: real tokens of the step, over all micro-batches and ranks, a number or a tensor of one.
        counts: as `StepTotals.counts_E`, [E] by router name.

    Raises:
        ConfigError: the model has no router.
        InputError: a number of tokens that is none, or counts that are not of all routers.
    """
    found = routers(model, "set_totals")
    if not (tokens.numel() == 1 if isinstance(tokens, Tensor) else is_finite(tokens) and tokens >= 0):
        raise InputError(f"tokens={tokens!r} must be the number of the step's tokens, or a tensor of it alone")
    if counts is not None and counts.keys() != found.keys():
        raise InputError(f"counts of {sorted(counts)}, but the routers are {sorted(found)}")
    for name, router in found.items():
        here = torch.as_tensor(tokens, dtype=torch.float64, device=router.weight.device).reshape(())
        router.totals = StepTotals(tokens=here, counts_E=None if counts is None else counts[name])


def max_vio(loads_E: Tensor) -> float:
    """(largest load - mean load) / mean load; 0 where nothing was routed."""
    mean = float(loads_E.double().mean())
    return (float(loads_E.max()) - mean) / mean if mean else 0.0
