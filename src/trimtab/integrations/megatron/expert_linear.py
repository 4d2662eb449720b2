"""One linear of all local experts in Megatron's terms: a rank's share, its flags, how it is drawn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from torch import Tensor

from trimtab.errors import ConfigError
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.weight import GroupedWeight


class ExpertShare:
    """What a rank has of each expert's weight [out, in], under expert tensor parallelism.

    whole: (out, in) over all ranks. cut: which of the two a rank has a share of. halves: in how many parts, each cut
    alike.
    """

    whole: tuple[int, int]
    cut: int
    halves: int
    tp_rank: int
    tp_size: int

    def take_share(
        self, config: Any, tp_group: Any, whole: tuple[int, int], cut: int, halves: int, draw: Callable[[Tensor], Any]
    ) -> tuple[int, int]:
        """(out, in) of this rank. draw: initializes a weight [out, in].

        Raises:
            ConfigError: the share does not divide.
        """
        self.config, self._draw_whole, self.whole, self.cut, self.halves = config, draw, whole, cut, halves
        self.tp_rank, self.tp_size = tp_group.rank(), tp_group.size()
        if whole[cut] % (halves * self.tp_size):
            each = " for each of gate and up" if halves > 1 else ""
            raise ConfigError(f"{whole[cut]} features do not divide by tp_size={self.tp_size}{each}")
        share = [*whole]
        share[cut] //= self.tp_size
        return share[0], share[1]

    def flag_parameters(self: Any) -> None:
        """Tell Megatron which group sums each gradient, and along which dimension, if any, a parameter is cut."""
        config = self.config
        of_experts = config.expert_model_parallel_size > 1
        of_experts |= config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        for name, param in self.named_parameters():
            cut = self.cut == 0 or name.startswith("weight")
            param.allreduce, param.tensor_model_parallel = not of_experts, cut
            if cut:
                param.partition_dim, param.partition_stride = self.cut + self.single_parameter, self.halves

    def draw_share(self, weight: Tensor) -> None:
        """One expert's weight, as Megatron draws it: on a CPU the whole on every rank, which keeps its share; on a
        device from the tracker of expert-parallel random numbers."""
        if not self.config.perform_initialization or weight.is_meta:
            return
        if self.config.use_cpu_initialization:
            whole = torch.empty(self.whole)
            self._draw_whole(whole)
            halves = whole.chunk(self.halves, self.cut)
            weight.copy_(torch.cat([half.chunk(self.tp_size, self.cut)[self.tp_rank] for half in halves], self.cut))
            return
        tracker = get_cuda_rng_tracker()
        with tracker.fork(get_expert_parallel_rng_tracker_name()) if tracker.is_initialized() else nullcontext():
            self._draw_whole(weight)


class ExpertLinear(ExpertShare, GroupedLinear):
    """The parameters of one linear of all experts; a call gives them out, so that hooks on a module's forward run, as
    those by which Megatron gathers parameters.

    Args:
        groups: how many experts. config: Megatron's. tp_group: over which one dimension is cut.
        out_features, in_features: over all ranks of the expert tensor parallel group.
        cut, halves, draw: see `ExpertShare`.
        single_parameter: `weight` [e, out, in] and `bias` [e, out], or `weight0` .. and `bias0` ..

    Raises:
        ConfigError: the share does not divide.
    """

    def __init__(
        self, groups: int, config: Any, tp_group: Any, out_features: int, in_features: int, *, cut: int, halves: int,
        draw: Callable[[Tensor], Any], single_parameter: bool,
    ) -> None:  # fmt: skip
        self.built = False
        outs, ins = self.take_share(config, tp_group, (out_features, in_features), cut, halves, draw)
        super().__init__(
            groups, ins, outs, bias=config.add_bias_linear, dtype=config.params_dtype, device=device_of(config),
            single_parameter=single_parameter, main_grad="accumulate" if config.gradient_accumulation_fusion else "off",
        )  # fmt: skip
        self.built = True
        self.flag_parameters()

    def forward(self) -> GroupedWeight:  # type: ignore[override]
        """The weights and biases."""
        return self.grouped_weight()

    @property
    def adaptable(self) -> tuple[str, ...]:
        """None: Megatron's flags and checkpoints know of no adapters here."""
        return ()

    @torch.no_grad()
    def draw(self, expert: int) -> None:
        """One expert's weight, and zeros for its bias."""
        self.draw_share(self.weights[0][expert] if self.single_parameter else self.weights[expert])
        if self.config.perform_initialization:
            for bias in self.biases[:1] if self.single_parameter else self.biases[expert : expert + 1]:
                bias.zero_()

    def reset_parameters(self) -> None:
        """Draw all experts, as where Megatron fills parameters that were built on the meta device; `Experts` draws
        what it builds, expert by expert."""
        for expert in range(self.num_groups if self.built else 0):
            self.draw(expert)


def device_of(config: Any) -> torch.device | str | int:
    """Where parameters are made."""
    if config.use_cpu_initialization:
        return "cpu"
    return "meta" if getattr(config, "init_model_with_meta_device", False) else torch.cuda.current_device()
