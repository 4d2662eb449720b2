"""Experts of Megatron's configuration over the rows of a rank: trimtab's products behind Megatron's parameters.

    linear_fc1.weight  [e, 2F, H], gate before up, or [e, F, H]     linear_fc2.weight  [e, H, F]
    linear_fc1.bias    [e, 2F]                                      linear_fc2.bias    [e, H]

or, with `single_parameter=False`, weight0 .. and bias0 .. of each expert. F is this rank's share under expert tensor
parallelism, of gate and of up alike.

Legend: M rows, K slots per row, e local experts, H hidden size, F hidden size of an expert, R expert rows,
I width of the pre-activations (2F with a gate, else F).
"""

from __future__ import annotations

from functools import partial
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu as fused_quick_gelu
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from trimtab.autograd import computed_in
from trimtab.errors import ConfigError
from trimtab.experts.activations import clamped
from trimtab.experts.mlp import RowFunction, expert_mlp
from trimtab.experts.plan import plan_experts
from trimtab.experts.weight_grad import DelayedGradients, GradSink
from trimtab.integrations.megatron.linears import PRODUCTS, ExpertLinear, asked_of_products
from trimtab.integrations.megatron.sharded_state import local_state, sharded_state
from trimtab.kernels.choose import KernelChoice

REFUSED = PRODUCTS | {
    "use_te_activation_func": "activations of TransformerEngine",
    "moe_mlp_glu_interleave_size": "gates and ups that alternate",
    "moe_paged_stash": "paged stashing",
    "use_kitchen": "Kitchen's linears",
}
"""Options that must not be set, and what they ask for."""


class Experts(MegatronModule):  # type: ignore[misc]
    """In the place of SequentialMLP or TEGroupedMLP: rows in, weighted sums of rows out.

    Gradients go where Megatron has them: to `.grad`, or with `config.gradient_accumulation_fusion` the weights' into
    `main_grad`; with `config.delay_wgrad_compute` when `backward_dw` is called. Each trained parameter gets one in each
    backward, zeros where no token came. Weights are initialized by `config.init_method` and
    `config.output_layer_init_method`, expert by expert, as SequentialMLP's.

    Args:
        num_local_experts: e, the experts of this rank.
        config: Megatron's TransformerConfig.
        submodules: part of Megatron's signature, not used.
        pg_collection: Megatron's groups, of which `ep`, `expt_tp` and `expt_dp` are read.
        name: what Megatron calls the module.
        single_parameter: one parameter of all experts, or one each, as Muon, upcycling and Megatron-Bridge want them:
            `use(spec, experts=ModuleSpec(module=Experts, params={"single_parameter": False}))`.
        kernels: what multiplies, by a name of `trimtab.kernels.choose.BACKENDS`, given in the same way.

    Raises:
        ConfigError: the configuration asks for what these experts do not have.
    """

    takes_rows = True

    def __init__(
        self, num_local_experts: int, config: Any, submodules: Any = None, pg_collection: Any = None,
        name: str | None = None, *, single_parameter: bool = True, kernels: str = "auto",
    ) -> None:  # fmt: skip
        _refuse(config, pg_collection)
        super().__init__(config=config)
        self.num_local_experts, self.name = num_local_experts, name
        self.ep_group, self.tp_group, self.dp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        self.activation, self.kernels = activation_of(config), KernelChoice(kernels)
        dim = config.hidden_size if getattr(config, "moe_latent_size", None) is None else config.moe_latent_size
        hidden, halves = config.moe_ffn_hidden_size, 2 if config.gated_linear_unit else 1
        groups = (num_local_experts, config, self.tp_group)
        linear = partial(ExpertLinear, *groups, single_parameter=single_parameter)
        self.linear_fc1 = linear(halves * hidden, dim, cut=0, halves=halves, draw=config.init_method)
        self.linear_fc2 = linear(dim, hidden, cut=1, halves=1, draw=config.output_layer_init_method)
        self.delay_wgrad = config.delay_wgrad_compute or getattr(
            config, "overlap_dispatch_backward_with_experts_wgrad", False
        )
        self._delayed = DelayedGradients()
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(local_state)

    def reset_parameters(self) -> None:
        """Draw every expert, in Megatron's order, from its tracker of expert-parallel random numbers on a device."""
        for expert in range(self.num_local_experts):
            self.linear_fc1.draw(expert)
            self.linear_fc2.draw(expert)

    def forward(
        self, x_MD: Tensor, ids_MK: Tensor, weights_MK: Tensor, *, num_slots: int | None = None
    ) -> tuple[Tensor, None]:
        """Weighted sums of each row's local experts [M, H], and None for the bias, which is added already. Local.

        Args:
            x_MD: rows [M, H], M >= 0.
            ids_MK: int local expert ids; a slot whose id is outside 0..e - 1 is dropped.
            weights_MK: routing weights, weighted with in float32 at least.
            num_slots: how many slots are kept, or how many at most, where it is known.
        """
        if self.config.moe_apply_probs_on_input:
            x_MD, weights_MK = (x_MD * weights_MK).to(x_MD.dtype), torch.ones_like(weights_MK)
        kernels = self.kernels.on(x_MD.device, computed_in(next(self.linear_fc1.parameters())))
        plan = plan_experts(ids_MK, self.num_local_experts, num_slots=num_slots, kernels=kernels)
        sink = GradSink(self.linear_fc2.main_grad, self._delayed.add if self.delay_wgrad else None)
        up, down = self.linear_fc1(), self.linear_fc2()
        return expert_mlp(x_MD, weights_MK, plan, up, down, self.activation, kernels, sink=sink), None

    def backward_dw(self) -> None:
        """With `config.delay_wgrad_compute`, the parameters' gradients of the oldest backward that has not had them."""
        if self._delayed:
            self._delayed.run()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """As SequentialMLP and TEGroupedMLP have it, which load what these save and the other way round, with other
        expert and expert-tensor parallelism as well."""
        return sharded_state(self, prefix, sharded_offsets, metadata)


def _refuse(config: Any, groups: Any) -> None:
    why = asked_of_products(config, REFUSED, groups)
    offloaded = set(getattr(config, "offload_modules", None) or ()) & {"expert_fc1", "moe_act", "fused_group_mlp"}
    if getattr(config, "fine_grained_activation_offloading", False) and offloaded:
        why.append(f"offload_modules {sorted(offloaded)} are inside of these experts, which keep their rows alone")
    if config.add_bias_linear and groups.expt_tp.size() > 1:
        why.append("add_bias_linear=True with expert tensor parallelism: Megatron's experts have no biases then")
    if config.moe_apply_probs_on_input and config.moe_router_topk != 1:
        why.append("moe_apply_probs_on_input=True needs moe_router_topk=1")
    if why:
        raise ConfigError(f"trimtab's experts do not have: {'; '.join(why)}. use(spec, experts=False) keeps Megatron's")


def activation_of(config: Any) -> str | RowFunction:
    """The word of `trimtab.experts.activations.activation_of` where it has one, or a function of one's own."""
    function, limit, shift = config.activation_func, config.activation_func_clamp_value, config.glu_linear_offset
    if not config.gated_linear_unit:
        words: dict[Any, str] = {squared_relu: "relu_squared", F.gelu: "gelu"}
        word: str | RowFunction = words.get(function, function)
        return word
    plain = limit is None and not shift
    if plain and function in (F.silu, F.gelu):
        return "swiglu" if function is F.silu else "geglu"
    if function in (F.silu, quick_gelu, fused_quick_gelu):
        alpha = 1.0 if function is F.silu else 1.702
        return clamped(alpha, inf if limit is None else float(limit), float(shift), interleaved=False)
    return partial(_gated, function, limit, shift)


def _gated(function: RowFunction, limit: float | None, shift: float, pre_RI: Tensor) -> Tensor:
    gate_RF, up_RF = pre_RI.chunk(2, dim=-1)
    if limit is not None:
        gate_RF, up_RF = gate_RF.clamp(max=limit), up_RF.clamp(-limit, limit)
    return function(gate_RF) * (up_RF + shift)
