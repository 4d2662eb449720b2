"""The experts of one rank as a module: up (and gate), activation, down.

Legend: M rows, K slots per row, E experts, D model dim, F hidden dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from trimtab.autograd import not_in_graphs, refuse_transforms
from trimtab.errors import ConfigError, InputError
from trimtab.experts.activations import activation_of, check_activation
from trimtab.experts.grouped_module import GroupedModule
from trimtab.experts.mlp import expert_mlp
from trimtab.experts.plan import plan_experts, plan_for
from trimtab.experts.weight import GroupedWeight, Weights
from trimtab.experts.weight_grad import GradSink, MainGradMode
from trimtab.kernels.choose import KernelChoice, kernels_for
from trimtab.kernels.tensor_checks import dense, described
from trimtab.validation import VALUES, check_flags, check_sizes, holds_ids, holds_values, is_whole

if TYPE_CHECKING:
    from trimtab.experts.recipes.base import Recipe
    from trimtab.experts.replicated import Replicas


class ExpertMLP(GroupedModule):
    """E expert MLPs over the rows of this rank: y = sum over a row's experts of w * down(activation(up(x))).

    Kept for the backward are the rows and the pre-activations; gathered rows and activations are made again.

    Args:
        num_experts: E, the experts of this rank.
        dim: D, the width of a row; on a GPU, and with kernels "grouped_mm", a multiple of 16 bytes in what is computed
            in.
        hidden: F, the width inside an expert; a multiple as well.
        activation: between the products; a name of `trimtab.experts.activations.ACTIVATIONS`.
        bias: whether up and down have biases.
        main_grad: where the gradients of the two weights go: "off" to autograd; "accumulate" is added to their
            `main_grad`, "overwrite" replaces it. Nobody sets their `.grad` then: do not read it. "te" and "te_first"
            are TransformerEngine's rules, see `trimtab.experts.weight_grad`.
        delay_wgrad: the parameters' gradients are computed by `backward_dw()`, not by the backward. The gradients of
            the pre-activations and of y are kept until then.
        recipe: low precision, see `trimtab.experts.recipes`; `recipe_way` says whether it is emulated. Every operand
            of a product is quantized, nothing else.
        kernels: what computes: "auto" or a name of `trimtab.kernels.choose.BACKENDS`; a `KernelChoice` may be shared
            by layers and can allow a fallback.
        dtype: of the parameters; torch's default one if not given.
        device: of the parameters; torch's default one if not given.

    Parameters: gate_up [E, 2, F, D] (gate 0, up 1) or, without a gate, up [E, F, D]; down [E, D, F]; with biases
    gate_up_bias [E, 2, F] or up_bias [E, F], and down_bias [E, D]. A recipe's states are `up_state` and `down_state`,
    saved with them.

    Raises:
        ConfigError: sizes, names or flags that do not fit.
        BackendError: the recipe cannot run on the device.
    """

    down: nn.Parameter
    down_bias: nn.Parameter | None
    codes: tuple[str, torch.dtype] | None = None
    """The format of the weights and the dtype that they stand for; None where they are what they seem."""

    def __init__(
        self, num_experts: int, dim: int, hidden: int, *, activation: str = "swiglu", bias: bool = False,
        dtype: torch.dtype | None = None, device: torch.device | str | None = None, main_grad: MainGradMode = "off",
        delay_wgrad: bool = False, recipe: Recipe | None = None, kernels: KernelChoice | str = "auto",
    ) -> None:  # fmt: skip
        from trimtab.experts.quantized import refuse_others

        super().__init__(dtype=dtype, main_grad=main_grad, delay_wgrad=delay_wgrad, recipe=recipe, kernels=kernels)
        check_sizes(num_experts=num_experts, dim=dim, hidden=hidden)
        check_flags(bias=bias)
        check_activation(activation)
        self.num_experts, self.dim, self.hidden, self.activation = num_experts, dim, hidden, activation
        self.gated = activation_of(activation).gated
        rows = (2, hidden) if self.gated else (hidden,)
        self._up = "gate_up" if self.gated else "up"
        shapes = {self._up: (*rows, dim), "down": (dim, hidden), f"{self._up}_bias": rows, "down_bias": (dim,)}
        for name, shape in shapes.items():
            new = torch.empty(num_experts, *shape, dtype=dtype, device=device) if bias or "bias" not in name else None
            self.register_parameter(name, None if new is None else nn.Parameter(new))
        self.up_state, self.down_state = self._new_state(num_experts), self._new_state(num_experts)
        self.register_load_state_dict_pre_hook(refuse_others)  # type: ignore[no-untyped-call]
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Each expert drawn as two `nn.Linear` draw themselves. Raises ConfigError: they are codes, which are read."""
        if self.codes is not None:
            raise ConfigError("codes are not drawn: load them, or draw the experts and quantize_ them", phase="experts")
        for name, fan_in in ((self._up, self.dim), ("down", self.hidden)):
            bound = 1 / math.sqrt(fan_in)
            getattr(self, name).uniform_(-bound, bound)
            bias = getattr(self, f"{name}_bias")
            if bias is not None:
                bias.uniform_(-bound, bound)

    @torch.no_grad()
    def quantize_(self, name: str) -> Self:
        """Put codes in the place of the two weights, see `trimtab.experts.quantized`: frozen parameters of the same
        names, with `<name>_scales` beside them. Before `parallelize`, which gives each rank its experts' codes.

        Raises:
            ConfigError: they have codes or are sharded, or there is no such format for their widths and dtype.
        """
        from trimtab.experts.quantized import hold, in_huge_pages, quantized

        weights = {key: getattr(self, key) for key in (self._up, "down")}
        if self.codes is not None or not all(dense(weight) for weight in weights.values()):
            raise ConfigError("experts are quantized once, before parallelize", phase="experts")
        made = {key: quantized(weight, name) for key, weight in weights.items()}
        self.codes = name, self.down.dtype
        for key, (codes, scales) in made.items():
            in_huge_pages(codes)
            hold(self, key, codes, scales)
        return self

    def expert_weights(self) -> Weights:
        """Up and down as they are now."""
        return self._weights(partial(getattr, self))

    def _weights(self, tensor: Callable[[str], Tensor]) -> Weights:
        """From this module's tensors by name."""
        form, dtype = self.codes or ("", None)
        if dtype is not None:
            from trimtab.experts.quantized import check_held

            for name in (self._up, "down"):
                check_held(getattr(self, name), getattr(self, f"{name}_scales"), form, dtype, type(self).__name__)
        lora = self._lora() if self.active_adapters else {}

        def read(name: str) -> GroupedWeight:
            return GroupedWeight(
                values=(tensor(name),), biases=() if self.down_bias is None else (tensor(f"{name}_bias"),),
                scales=tensor(f"{name}_scales") if form else None, lora=lora.get(name), format=form, dtype=dtype,
            )  # fmt: skip

        return read(self._up), read("down")

    @property
    def adaptable(self) -> tuple[str, ...]:
        """The weights that may have adapters."""
        return (self._up, "down")

    def stands_for(self, name: str) -> tuple[Sequence[int], torch.dtype]:
        """The shape and the dtype of a weight, or of what its codes stand for."""
        if self.codes is None:
            return super().stands_for(name)
        from trimtab.experts.quantized import FORMATS

        return FORMATS[self.codes[0]].shape_of(self.get_parameter(name)), self.codes[1]

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """("gate_up", "down"), or ("up", "down") without a gate; then their biases, if there are any."""
        names = (self._up, "down")
        return names if self.down_bias is None else (*names, *(f"{name}_bias" for name in names))

    def forward(
        self, x_MD: Tensor, ids_MK: Tensor, w_MK: Tensor, *, num_slots: int | None = None,
        replicas: Replicas | None = None,
    ) -> Tensor:  # fmt: skip
        """Weighted sum of each row's experts: [M, D] in x's dtype, computed in the parameters' dtype or, as `nn.Linear`
        is, in autocast's. Gradients of parameters are in their own dtype.

        Args:
            x_MD: in float64, float32, bfloat16 or float16, M >= 0.
            ids_MK: int local expert ids; a slot whose id is outside 0..E - 1 is dropped.
            w_MK: routing weights, in one of these dtypes; their gradient comes back in their dtype.
            num_slots: how many slots are kept, or how many at most, where it is known.
            replicas: those of other ranks' experts that have rows here in this call, of ids from E on. Collective then;
                the backward adds their gradients to those of their homes, see `trimtab.experts.replicated`.

        Raises:
            ConfigError: a parameter was cast to another dtype than these, or wraps other tensors, as a quantized one.
            InputError: shapes, dtypes or layouts other than these; more slots are kept than `num_slots`, on the CPU;
                under a transform of `torch.func`.
            BackendError: the kernels fail their self-test, see `KernelChoice`.

        Under `torch.compile` and `torch.export` it is operators of the graph; with an option that has state
        (`main_grad`, `delay_wgrad`, `recipe`) or kernels of one's own it runs eagerly, between two graphs.
        """
        weights = self.expert_weights()
        if replicas is None:
            return self.run(weights, x_MD, ids_MK, w_MK, num_slots)
        from trimtab.experts.replicated import run_with_replicas

        return run_with_replicas(self, weights, x_MD, ids_MK, w_MK, replicas)

    def run(
        self, weights: Weights, x_MD: Tensor, ids_MK: Tensor, w_MK: Tensor, num_slots: int | None = None,
        main_grad: MainGradMode | None = None,
    ) -> Tensor:  # fmt: skip
        """`forward` with other weights than the module's own parameters. main_grad: another mode than the module's."""
        legal = dense(x_MD) and dense(ids_MK) and dense(w_MK)
        legal = legal and x_MD.ndim == ids_MK.ndim == 2 and ids_MK.shape == w_MK.shape
        legal = legal and x_MD.shape[0] == ids_MK.shape[0] and x_MD.shape[1] == self.dim
        if not legal or not holds_ids(ids_MK) or not holds_values(x_MD.dtype) or not holds_values(w_MK.dtype):
            raise InputError(
                f"expected floating x [M, {self.dim}], int ids [M, K] and floating weights [M, K], all dense, the "
                f"floating ones in {VALUES}, got {', '.join(described(t) for t in (x_MD, ids_MK, w_MK))}",
                phase="experts",
            )
        up, down = weights
        for weight in weights:
            self._refuse_unsupported(weight.biases if weight.format else (*weight.values, *weight.biases))
        refuse_transforms(type(self).__name__)
        kernels = kernels_for(self.kernels, x_MD.device, up.computed_in)
        in_graph = isinstance(kernels, str)  # where it may be a symbol
        if num_slots is not None and not in_graph and (not is_whole(num_slots) or num_slots < 0):
            raise InputError(f"num_slots={num_slots!r} must be a whole number, at least 0, or None", phase="experts")
        if kernels is None or self._has_state():
            return self._stateful(weights, x_MD, ids_MK, w_MK, num_slots, main_grad or self.main_grad)
        plan = plan_for(ids_MK, up.groups, num_slots, kernels)
        return expert_mlp(x_MD, w_MK, plan, up, down, self.activation, kernels)

    @not_in_graphs
    def _stateful(
        self, weights: Weights, x_MD: Tensor, ids_MK: Tensor, w_MK: Tensor, num_slots: int | None,
        main_grad: MainGradMode,
    ) -> Tensor:  # fmt: skip
        """Between two graphs where `torch.compile` traces."""
        up, down = weights
        kernels = self.kernels.on(x_MD.device, up.computed_in)
        engine = self.engine_for(self._widths())
        alignment = 1 if self.recipe is None else (engine or self.recipe).alignment
        plan = plan_experts(ids_MK, up.groups, alignment=alignment, num_slots=num_slots, kernels=kernels)
        low = None
        if self.recipe is not None:
            from trimtab.experts.low_precision import LowPrecisionProducts

            ups, downs = self.up_state, self.down_state
            assert ups is not None
            assert downs is not None
            made = partial(LowPrecisionProducts, kernels, plan.offsets_e, engine=engine)
            low = made(ups.call()), made(downs.call())
        sink = GradSink(main_grad, self._delayed.add if self.delay_wgrad else None)
        return expert_mlp(x_MD, w_MK, plan, up, down, self.activation, kernels, sink=sink, low_precision=low)

    def _widths(self, ranks: int = 1) -> Sequence[tuple[int, int]]:
        hidden = self.hidden // ranks  # that share F
        return [(self.dim, 2 * hidden if self.gated else hidden), (hidden, self.dim)]

    def extra_repr(self) -> str:
        shown = f"{self.num_experts} x ({self.dim} -> {self.hidden} -> {self.dim}), {self.activation}"
        shown += f", bias={self.down_bias is not None}"
        return shown + self._options()
