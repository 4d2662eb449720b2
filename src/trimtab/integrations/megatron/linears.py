"""Linears of all local experts in Megatron's terms: a rank's share, its flags, how it is drawn, what it saves.

ExpertLinear                    of our `Experts`: holds parameters
GroupedColumn, GroupedRow       `linear_fc1` and `linear_fc2` of Megatron's TEGroupedMLP, without TransformerEngine:

use(spec, experts=grouped_mlp())        behind our exchange
submodules.experts = grouped_mlp()      of a spec of one's own
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import __version__
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.moe import experts
from torch import Tensor

from trimtab.errors import ConfigError
from trimtab.experts.linear import GroupedLinear as Grouped
from trimtab.experts.segments import GroupSizes
from trimtab.experts.weight import GroupedWeight
from trimtab.integrations import transformer_engine as te
from trimtab.integrations.megatron.protocol import ModuleSpec, asked
from trimtab.integrations.megatron.sharded_state import linear_state

ASKED = tuple(map(int, __version__.split(".")[:2])) >= (0, 19)
"""Megatron's Muon asks a parameter for the parts that it takes it apart into; before, it knew those of attention."""
SUBMODULES = getattr(experts, "GroupedMLPSubmodules", experts.MLPSubmodules)
"""The former has been there since 0.17."""
PRODUCTS = {
    "fp8": "products in 8 bits",
    "fp4": "products in 4 bits",
    "use_transformer_engine_op_fuser": "TransformerEngine's fused operators",
}
"""Options that must not be set where our products run, and what they ask for."""
LINEARS = PRODUCTS | {
    "moe_single_grouped_weight": "one weight of all experts",
    "moe_single_grouped_bias": "one bias of all experts",
}


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
            if self.halves > 1 and name.startswith("weight") and ASKED:
                param.is_qkv, param.qkv_split_shapes = True, [param.shape[-2] // self.halves] * self.halves

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


class ExpertLinear(ExpertShare, Grouped):
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

    adaptable = ()
    """Megatron's flags and checkpoints know of the weights alone."""

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


class GroupedLinear(ExpertShare, te.GroupedLinear):
    """`weight0` .. and `bias0` .. of the local experts, each rank's share under expert tensor parallelism, with the
    flags, the initialization and the sharded checkpoints of Megatron's TEGroupedLinear.

    Of the configuration it heeds `gradient_accumulation_fusion`, `delay_wgrad_compute`, `params_dtype`,
    `perform_initialization`, `use_cpu_initialization` and `init_model_with_meta_device`.

    Args are those of TEColumnParallelGroupedLinear; sizes are over all ranks of the expert tensor parallel group.

    Raises:
        ConfigError: sizes do not divide, or the configuration asks for FP8, FP4, one parameter of all experts or
            TransformerEngine's fused operators.
    """

    parallel: str

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: Any,
        init_method: Callable[[Tensor], Any], bias: bool, skip_bias_add: bool, is_expert: bool = True,
        tp_comm_buffer_name: str | None = None, pg_collection: Any = None, name: str | None = None,
    ) -> None:  # fmt: skip
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        why = asked_of_products(config, LINEARS, groups) + ([] if is_expert else ["is_expert=False"])
        if why:
            raise ConfigError(f"trimtab's grouped linears do not have: {'; '.join(why)}")
        self.num_local_experts, self.ep_group, self.dp_group = num_gemms, groups.ep, groups.expt_dp
        gated = config.gated_linear_unit and not getattr(config, "moe_mlp_glu_interleave_size", None)
        cut, halves = int(self.parallel == "row"), 2 if gated and self.parallel == "column" else 1
        self.take_share(config, groups.expt_tp, (output_size, input_size), cut, halves, init_method)
        super().__init__(
            num_gemms, input_size, output_size, fuse_wgrad_accumulation=config.gradient_accumulation_fusion,
            tp_size=groups.expt_tp.size(), init_method=self.draw_share, bias=bias, return_bias=skip_bias_add and bias,
            params_dtype=config.params_dtype, parallel_mode=self.parallel, device=device_of(config),
            ub_name=tp_comm_buffer_name, delay_wgrad_compute=config.delay_wgrad_compute, name=name,
        )  # fmt: skip
        self.tp_group = groups.expt_tp
        self.flag_parameters()

    def forward(self, x_RA: Tensor, m_splits: GroupSizes) -> tuple[Tensor, Any]:  # type: ignore[override]
        """The output, and what Megatron is to add to it: None, or a bias of each expert."""
        out = super().forward(x_RA, m_splits)
        return out if isinstance(out, tuple) else (out, None)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """As TEGroupedLinear's: one shard of each expert's parameter, which TEGroupedMLP names and parts."""
        name = prefix.removesuffix(".")
        state = linear_state(self, self, "", name, sharded_offsets, metadata, whole=True)
        return {f"{prefix}{own}": value for own, value in state.items()}


class GroupedColumn(GroupedLinear):
    """For `linear_fc1`: each rank has a share of gate and of up."""

    parallel = "column"


class GroupedRow(GroupedLinear):
    """For `linear_fc2`: each rank has a share of the inputs; whoever combines the ranks' outputs sums them."""

    parallel = "row"


def grouped_mlp() -> Any:
    """A spec of TEGroupedMLP with these linears, for `experts` of an MoE layer's submodules."""
    linears = SUBMODULES(linear_fc1=GroupedColumn, linear_fc2=GroupedRow)
    return ModuleSpec(module=experts.TEGroupedMLP, submodules=linears)


def asked_of_products(config: Any, options: dict[str, str], groups: Any) -> list[str]:
    """What a configuration asks of experts that trimtab's products do not have."""
    remat = getattr(groups, "expt_gtp_remat", None)
    cut = "expt_gtp_remat asks for weights cut over a group of generalized tensor parallelism"
    return asked(config, options) + ([cut] if remat is not None and remat.size() > 1 else [])


def device_of(config: Any) -> torch.device | str | int:
    """Where parameters are made."""
    if config.use_cpu_initialization:
        return "cpu"
    return "meta" if getattr(config, "init_model_with_meta_device", False) else torch.cuda.current_device()
