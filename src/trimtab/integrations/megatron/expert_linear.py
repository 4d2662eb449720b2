"""The parameters of one linear of all local experts: their form, Megatron's flags on them, how they are drawn.

Legend: R expert rows.
"""

from __future__ import annotations

from collections.abc import Callable
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
        of_experts = config.expert_model_parallel_size > 1
        of_experts |= config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        for kind, shape in {"weight": share, "bias": share[:1]}.items():
            if kind == "bias" and not config.add_bias_linear:
                continue
            for name in [kind] if single_parameter else [f"{kind}{i}" for i in range(groups)]:
                sizes = [groups, *shape] if single_parameter else shape
                param = nn.Parameter(torch.empty(sizes, dtype=config.params_dtype, device=_device(config)))
                param.allreduce = not of_experts  # type: ignore[attr-defined]
                if cut == 0 or kind == "weight":
                    param.tensor_model_parallel = True  # type: ignore[attr-defined]
                    param.partition_dim = cut + single_parameter  # type: ignore[attr-defined]
                    param.partition_stride = halves  # type: ignore[attr-defined]
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
        (weights, biases), config = self(), self._config
        weight = weights[0][expert] if self.single_parameter else weights[expert]
        if not config.perform_initialization or weight.is_meta:
            return
        if config.use_cpu_initialization:  # the same on every rank: each keeps its share
            whole = torch.empty(self.whole)
            self._draw(whole)
            halves = whole.chunk(self.halves, self.cut)
            weight.copy_(torch.cat([half.chunk(self.tp_size, self.cut)[self.tp_rank] for half in halves], self.cut))
        else:
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                self._draw(weight)
        for bias in biases[:1] if self.single_parameter else biases[expert : expert + 1]:
            bias.zero_()

    def reset_parameters(self) -> None:
        """Draw all experts, as where Megatron fills parameters that were built on the meta device."""
        for expert in range(self.num_experts):
            self.draw(expert)


def _device(config: Any) -> torch.device | str | int:
    if config.use_cpu_initialization:
        return "cpu"
    return "meta" if getattr(config, "init_model_with_meta_device", False) else torch.cuda.current_device()
