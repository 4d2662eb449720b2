"""The parameters of one linear of all local experts: their form, Megatron's flags on them, how they are drawn.

Legend: R expert rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.experts.grouped_linear import linear_of
from trimtab.experts.plan import ExpertPlan
from trimtab.experts.weight_grad import DelayedGradients, MainGradMode
from trimtab.kernels.api import Backend


class ExpertLinear(nn.Module):
    """The parameters of one linear of all experts; a call gives them out, so that hooks on a module's forward run, as
    those by which Megatron gathers parameters.

    Args:
        groups: how many experts. config: Megatron's. tp_group: over which one dimension is cut.
        out_features, in_features: over all ranks of the expert tensor parallel group.
        cut: which of the two a rank has a share of. halves: in how many parts, each cut alike.
        draw: initializes a weight [out, in].
        single_parameter: `weight` [e, out, in] and `bias` [e, out], or `weight0` .. and `bias0` ..

    Raises:
        ConfigError: the share does not divide.
    """

    def __init__(
        self, groups: int, config: Any, tp_group: Any, out_features: int, in_features: int, *, cut: int, halves: int,
        draw: Callable[[Tensor], Any], single_parameter: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_experts, self.single_parameter, self.cut, self.halves = groups, single_parameter, cut, halves
        self.whole, self._draw, self._config = (out_features, in_features), draw, config
        self.tp_rank, self.tp_size = tp_group.rank(), tp_group.size()
        self.main_grad: MainGradMode = "accumulate" if config.gradient_accumulation_fusion else "off"
        self.delayed = DelayedGradients()
        later = config.delay_wgrad_compute or getattr(config, "overlap_dispatch_backward_with_experts_wgrad", False)
        self.defer = self.delayed.add if later else None
        if self.whole[cut] % (halves * self.tp_size):
            width = self.whole[cut] // halves
            raise ConfigError(f"F = {width} does not divide over {self.tp_size} expert-tensor-parallel ranks")
        share = list(self.whole)
        share[cut] //= self.tp_size
        for kind, shape in {"weight": share, "bias": share[:1]}.items():
            if kind == "bias" and not config.add_bias_linear:
                continue
            for name in [kind] if single_parameter else [f"{kind}{i}" for i in range(groups)]:
                sizes = [groups, *shape] if single_parameter else shape
                param = nn.Parameter(torch.empty(sizes, dtype=config.params_dtype, device=device_of(config)))
                flag(param, config, cut + single_parameter if cut == 0 or kind == "weight" else None, halves)
                self.register_parameter(name, param)

    def forward(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Weights, and biases if there are any: one that is stacked, or one of each expert."""
        of = {kind: tuple(p for n, p in self.named_parameters() if n.startswith(kind)) for kind in ("weight", "bias")}
        return of["weight"], of["bias"]

    def stacked(self) -> tuple[Tensor, Tensor | None]:
        """The weight of all experts, and their bias if they have one."""
        (weight,), biases = self()
        return weight, biases[0] if biases else None

    def product(self, x_RD: Tensor, plan: ExpertPlan, kernels: Backend) -> Tensor:
        """x W_i^T + b_i."""
        weights, biases = self()
        options: dict[str, Any] = {"main_grad": self.main_grad, "defer": self.defer, "kernels": kernels}
        return linear_of(x_RD, weights, biases, plan.offsets_e, stacked=self.single_parameter, **options)

    @torch.no_grad()
    def draw(self, expert: int) -> None:
        """One expert's weight, and zeros for its bias."""
        weights, biases = self()
        weight = weights[0][expert] if self.single_parameter else weights[expert]
        if self._config.perform_initialization and not weight.is_meta:
            draw_share(weight, self, self._draw, self._config)
            for bias in biases[:1] if self.single_parameter else biases[expert : expert + 1]:
                bias.zero_()

    def reset_parameters(self) -> None:
        """Draw all experts, as where Megatron fills parameters that were built on the meta device."""
        for expert in range(self.num_experts):
            self.draw(expert)


def device_of(config: Any) -> torch.device | str | int:
    """Where parameters are made."""
    if config.use_cpu_initialization:
        return "cpu"
    return "meta" if getattr(config, "init_model_with_meta_device", False) else torch.cuda.current_device()


def flag(param: Any, config: Any, dim: int | None, stride: int) -> None:
    """Tell Megatron which group sums the gradient, and along which dimension, if any, the parameter is cut."""
    of_experts = config.expert_model_parallel_size > 1
    of_experts |= config.expert_tensor_parallel_size != config.tensor_model_parallel_size
    param.allreduce, param.tensor_model_parallel = not of_experts, dim is not None
    if dim is not None:
        param.partition_dim, param.partition_stride = dim, stride


def draw_share(weight: Tensor, of: Any, draw: Callable[[Tensor], Any], config: Any) -> None:
    """One expert's weight, as Megatron draws it: on a CPU the whole on every rank, which keeps its share; on a device
    from the tracker of expert-parallel random numbers. of: has `whole`, `cut`, `halves`, `tp_rank` and `tp_size`."""
    if config.use_cpu_initialization:
        whole = torch.empty(of.whole)
        draw(whole)
        halves = whole.chunk(of.halves, of.cut)
        weight.copy_(torch.cat([half.chunk(of.tp_size, of.cut)[of.tp_rank] for half in halves], of.cut))
        return
    tracker = get_cuda_rng_tracker()
    with tracker.fork(get_expert_parallel_rng_tracker_name()) if tracker.is_initialized() else nullcontext():
        draw(weight)
