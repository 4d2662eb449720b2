"""The experts of one rank as a module: up (and gate), activation, down.

Legend: M rows, K slots per row, R kept slots, r those of the busiest expert, E experts, D model dim, F hidden dim,
I = 2F with a gate, else F.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trimtab.autocast import computed_in
from trimtab.errors import ConfigError, InputError
from trimtab.experts.activations import BY_NAME
from trimtab.experts.expert_call import TwoProducts
from trimtab.experts.grouped_module import GroupedModule
from trimtab.experts.main_grad import MainGradMode
from trimtab.experts.mlp import ExpertMath, ExpertWeights, expert_mlp
from trimtab.experts.plan import plan_experts
from trimtab.experts.recipes.base import Recipe
from trimtab.kernels.memory import dense, described
from trimtab.kernels.selftest import KernelChoice
from trimtab.routing.ids import holds_ids
from trimtab.validation import VALUES, check_flags, check_sizes, holds_values, is_whole

WEIGHTS = ("experts", "combine")


def check_names(activation: str, weights: str) -> None:
    """Raises:
    ConfigError: no such activation, or no such place for the routing weights.
    """
    if activation not in tuple(BY_NAME):
        raise ConfigError(f"activation {activation!r} is not one of {tuple(BY_NAME)}")
    if weights not in WEIGHTS:
        raise ConfigError(f"weights={weights!r} is not one of {WEIGHTS}")


class ExpertMLP(GroupedModule):
    """E expert MLPs over the rows of this rank.

    Memory, in bytes at s bytes per value, beyond the parameters, their gradients, x, y and dy:

        kept for the backward   s R I                                       the pre-activations
        peak of the forward     s (R (I + D) + max(M D, r D, a r F))
        peak of the backward    s (R (I + D) + max(M D, r (c F + D), b r F))

        a = 3 for clamped_swiglu, else 1, on kernels "stock" 2 with weights="experts"
        b = 6 for clamped_swiglu, 4 for the other gates, 2 without a gate
        c = 4 for swiglu and geglu, else 3, on kernels "stock" 3

    and 48 bytes of indices per kept slot, on kernels "loop" without biases and with parameters in a dtype that the
    machine computes in; experts of few rows are taken together, r = 256.
    Kernels "stock" take all experts at once and copy each result: r = R, and r (F + D) joins the forward's maximum.
    Gathered rows and activations are never kept.

    Kernels "compiled" keep the same and work on n waves of experts, n = R / 512 with one thread, R / (2048 t) with t,
    within 1 and 16: W = R / n + r rows at most, which threads take in pieces of p <= 512. Beside s R I they need, with
    v = 2 where bfloat16 has products of its own (`trimtab.kernels.bf16`) and 4 elsewhere,

        for the second products   v F + 64 a row in the forward, v I + 64 in the backward: of p rows, but of W with
                                  several threads and where the weights' gradients are made from them: v = s, no delay
        for weight gradients      s W F where v = 2, s W I where s is not v
        for sums of tokens        4 M D where s = 2
        for each thread           p (v D + 128) bytes, or 0.52 MB, and 1.0 MB, but 2.2 MB for gradients where v = 2

    What goes the way of "loop" has r = 2048.
    Delayed weight gradients hold another s R I. What "loop" and "compiled" free they keep for the next call, half as
    much again at most.

    Under autocast s is of its dtype, and in it are copies of x, kept, s M D, of y and in the backward of dy and dx,
    s M D each, in each pass of up and down, s E (I + F) D, and on kernels "loop" of one expert's gradient. Without a
    recipe the compiled kernels round float32 to bfloat16 as they read it, without a copy of up or down.
    With a recipe the same is kept, R counting the padding of the segments; all experts are taken at once, and each
    product has its two operands quantised beside it: in 1 byte a value on hardware, in float32 where emulated. Weight
    gradients that are delayed keep their operands quantised instead of what is said at `delay_wgrad`.

    Args:
        num_experts: E.
        dim, hidden: D and F; on a GPU, and with kernels "stock", multiples of 16 bytes in what is computed in.
        activation: "swiglu", "geglu" (gate first, then up), "clamped_swiglu" (as in gpt-oss) with a gate;
            "relu_squared", "gelu" without. GELU is the one of the error function.
        bias: whether up and down have biases.
        weights: where routing weights are applied, "experts" (to the hidden rows) or "combine" (to the outputs, as
            they are summed). The same numbers up to rounding; "experts" moves less where F < D. On kernels "loop" they
            are applied to the outputs either way, which costs nothing there, in a dtype that the machine computes in.
        main_grad: where the gradients of `up` and `down` go, see `trimtab.experts.main_grad`. Nobody sets their
            `.grad` then: do not read it.
        delay_wgrad: the parameters' gradients are computed by `backward_dw()`, not by the backward. The gradients of
            the pre-activations and of y are kept until then: s (2 R I + 2 M D) in all, with x and the pre-activations.
        recipe: low precision, see `trimtab.experts.recipes`; `recipe_way` says whether it is emulated. Every operand
            of a product is quantised, nothing else: pre-activations are saved and gradients come as without.
        kernels: what computes; a `KernelChoice` may be shared by layers and can allow a fallback.

    Parameters: gate_up [E, 2, F, D] (gate 0, up 1) or, without a gate, up [E, F, D]; down [E, D, F]; with biases
    gate_up_bias [E, 2, F] or up_bias [E, F], and down_bias [E, D]. A recipe's states are `up_state` and `down_state`,
    saved with them.

    Raises:
        ConfigError: sizes, names or flags that do not fit.
        BackendError: the recipe cannot run on the device.
    """

    down: nn.Parameter
    down_bias: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        weights: Literal["experts", "combine"] = "experts",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        main_grad: MainGradMode = "off",
        delay_wgrad: bool = False,
        recipe: Recipe | None = None,
        kernels: KernelChoice | str = "auto",
    ) -> None:
        super().__init__(dtype=dtype, main_grad=main_grad, delay_wgrad=delay_wgrad, recipe=recipe, kernels=kernels)
        check_sizes(num_experts=num_experts, dim=dim, hidden=hidden)
        check_flags(bias=bias)
        check_names(activation, weights)
        self.num_experts, self.dim, self.hidden = num_experts, dim, hidden
        self.activation, self.weights = activation, weights
        made = BY_NAME[activation]()
        self.math = ExpertMath(activation=made, weights=weights)
        rows = (2, hidden) if made.gated else (hidden,)
        self._up = "gate_up" if made.gated else "up"
        shapes = {self._up: (*rows, dim), "down": (dim, hidden), f"{self._up}_bias": rows, "down_bias": (dim,)}
        for name, shape in shapes.items():
            new = torch.empty(num_experts, *shape, dtype=dtype, device=device) if bias or "bias" not in name else None
            self.register_parameter(name, None if new is None else nn.Parameter(new))
        self.up_state, self.down_state = self._new_state(num_experts), self._new_state(num_experts)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Each expert drawn as two `nn.Linear` draw themselves."""
        for name, fan_in in ((self._up, self.dim), ("down", self.hidden)):
            bound = 1 / math.sqrt(fan_in)
            getattr(self, name).uniform_(-bound, bound)
            bias = getattr(self, f"{name}_bias")
            if bias is not None:
                bias.uniform_(-bound, bound)

    def expert_weights(self) -> ExpertWeights:
        """The parameters as they are now."""
        up, up_bias = getattr(self, self._up), getattr(self, f"{self._up}_bias")
        return ExpertWeights(up=up, down=self.down, up_bias=up_bias, down_bias=self.down_bias)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """("gate_up", "down"), or ("up", "down") without a gate; then their biases, if there are any."""
        names = (self._up, "down")
        return names if self.down_bias is None else (*names, *(f"{name}_bias" for name in names))

    def __getattr__(self, name: str) -> Any:
        if name in ("up", "up_bias") and self.__dict__.get("_up") == "gate_up":
            warnings.warn(f"experts.{name} is experts.gate_{name} [E, 2, F, …] now", DeprecationWarning, stacklevel=2)
            value: Any = super().__getattr__(f"gate_{name}")
            return None if value is None else value.flatten(1, 2)
        return super().__getattr__(name)

    def forward(self, x_MD: Tensor, ids_MK: Tensor, w_MK: Tensor, *, num_slots: int | None = None) -> Tensor:
        """Weighted sum of each row's experts: [M, D] in x's dtype, computed in the parameters' dtype or, as `nn.Linear`
        is, in autocast's: with copies of the parameters that each pass makes anew, on the CPU of those experts that
        have rows, or with none, see above. Gradients of parameters are in their own dtype; kernels "compiled" and
        "triton" do not round them to the other.

        Args:
            x_MD: in float64, float32, bfloat16 or float16, M >= 0.
            ids_MK: int local expert ids; a slot whose id is outside 0..E - 1 is dropped.
            w_MK: routing weights, in one of these dtypes; their gradient comes back in their dtype.
            num_slots: how many slots are kept, or how many at most, where it is known.

        Raises:
            ConfigError: a parameter was cast to another dtype than these, or wraps other tensors, as a quantised one.
            InputError: shapes, dtypes or layouts other than these; more slots are kept than `num_slots`, on the CPU;
                under a transform of `torch.func`.
            BackendError: the kernels fail their self-test, see `KernelChoice`.
        """
        legal = dense(x_MD) and dense(ids_MK) and dense(w_MK)
        legal = legal and x_MD.ndim == ids_MK.ndim == 2 and ids_MK.shape == w_MK.shape
        legal = legal and x_MD.shape[0] == ids_MK.shape[0] and x_MD.shape[1] == self.dim
        if not legal or not holds_ids(ids_MK) or not holds_values(x_MD.dtype) or not holds_values(w_MK.dtype):
            raise InputError(
                f"expected floating x [M, {self.dim}], int ids [M, K] and floating weights [M, K], all dense, the "
                f"floating ones in {VALUES}, got {', '.join(described(t) for t in (x_MD, ids_MK, w_MK))}",
                phase="experts",
            )
        weights = self.expert_weights()
        self._refuse_codes(weights.each)
        if torch.compiler.is_compiling():
            from trimtab.experts.compiled import compiled_experts

            return compiled_experts(self, x_MD, ids_MK, w_MK, num_slots)
        self._refuse_transforms()
        if num_slots is not None and (not is_whole(num_slots) or num_slots < 0):
            raise InputError(f"num_slots={num_slots!r} must be a whole number, at least 0, or None", phase="experts")
        low = self._lowered()
        kernels = self.kernels.on(x_MD.device, computed_in(weights.up), (self.dim, self.hidden))
        defer = self._delayed.add if self.delay_wgrad else None
        alignment = 1 if low is None else low.alignment
        if kernels.name == "triton":  # there is Triton then
            from trimtab.experts.mlp_triton import plan_on_device

            plan = plan_on_device(ids_MK, self.num_experts, alignment=alignment, num_slots=num_slots)
        else:
            plan = plan_experts(ids_MK, self.num_experts, alignment=alignment, num_slots=num_slots, kernels=kernels)
        products = None
        if low is not None:
            products = TwoProducts(
                *(low.products(kernels, plan.offsets_e, state) for state in (self.up_state, self.down_state))
            )
        return expert_mlp(
            x_MD, w_MK, plan, weights, self.math, kernels, main_grad=self.main_grad, defer=defer, products=products
        )

    def _widths(self) -> Sequence[tuple[int, int]]:
        return [(self.dim, self.expert_weights().width), (self.hidden, self.dim)]

    def _device(self) -> torch.device:
        return self.down.device

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        shown = f"{self.num_experts} x ({self.dim} -> {self.hidden} -> {self.dim}), {self.activation}"
        shown += f", bias={self.down_bias is not None}, weights={self.weights!r}"
        return shown + self._options()
