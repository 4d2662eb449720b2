"""trimtab's grouped linear as `linear_fc1` and `linear_fc2` of Megatron's TEGroupedMLP, which needs no
TransformerEngine then:

    use(spec, experts=grouped_mlp())        behind our exchange
    submodules.experts = grouped_mlp()      of a spec of one's own
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import experts
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from trimtab.experts.segments import GroupSizes
from trimtab.integrations import transformer_engine as te
from trimtab.integrations.megatron.expert_linear import ExpertShare, device_of
from trimtab.integrations.megatron.refused import refuse_in_linears
from trimtab.integrations.megatron.sharded_state import linear_state

SUBMODULES = getattr(experts, "GroupedMLPSubmodules", experts.MLPSubmodules)
"""The former has been there since 0.17."""


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
        refuse_in_linears(config, groups, is_expert)
        self.num_local_experts, self.ep_group, self.dp_group = num_gemms, groups.ep, groups.expt_dp
        gated = config.gated_linear_unit and not getattr(config, "moe_mlp_glu_interleave_size", None)
        cut, halves = int(self.parallel == "row"), 2 if gated and self.parallel == "column" else 1
        self.take_share(config, groups.expt_tp, (output_size, input_size), cut, halves, init_method)
        super().__init__(
            num_gemms,
            input_size,
            output_size,
            fuse_wgrad_accumulation=config.gradient_accumulation_fusion,
            tp_size=groups.expt_tp.size(),
            init_method=self.draw_share,
            bias=bias,
            return_bias=skip_bias_add and bias,
            params_dtype=config.params_dtype,
            parallel_mode=self.parallel,
            device=device_of(config),
            ub_name=tp_comm_buffer_name,
            delay_wgrad_compute=config.delay_wgrad_compute,
            name=name,
        )
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
    return ModuleSpec(
        module=experts.TEGroupedMLP, submodules=SUBMODULES(linear_fc1=GroupedColumn, linear_fc2=GroupedRow)
    )
