"""A linear layer per group of rows. A group without rows is a group; where the sizes live does not matter.

    x [R, in], sizes (3, 0, 2)          y [R, out]
      rows 0-2   --- W_0, b_0 --->      rows 0-2
      (none)         W_1, b_1           (none; their gradients are zeros)
      rows 3-4   --- W_2, b_2 --->      rows 3-4
      rows 5-..  (any values)           zeros

Legend: R rows, G groups.
"""

from __future__ import annotations

import math
import re
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trimtab.autograd import computed_in, forward_of, not_in_graphs, refuse_transforms
from trimtab.errors import InputError
from trimtab.experts.grouped_module import GroupedModule
from trimtab.experts.grouped_product import grouped_product
from trimtab.experts.plan import ExpertPlan, plan_experts
from trimtab.experts.segments import GroupSizes, ToExperts, offsets_of
from trimtab.experts.weight import GroupedWeight
from trimtab.experts.weight_grad import GradSink, MainGradMode
from trimtab.kernels.choose import KernelChoice, kernels_for
from trimtab.kernels.tensor_checks import dense, described
from trimtab.validation import VALUES, check_flags, check_sizes, holds_values

if TYPE_CHECKING:
    from trimtab.experts.recipes.base import Recipe


class GroupedLinear(GroupedModule):
    """y = x W_g^T + b_g, g the group of the row.

    Args:
        num_groups: G, the weights, one for each group of rows.
        in_features: width of a row; on a GPU, and with kernels "grouped_mm", a multiple of 16 bytes in what is computed
            in.
        out_features: width of an output row; a multiple as well.
        bias: whether each group has one.
        single_parameter: `weight` [G, out, in] and `bias` [G, out], or `weight0` .. and `bias0` .. . State dicts of
            either form load into either.
        main_grad: "off", or "accumulate" or "overwrite": weight gradients go into `weight.main_grad`, whose shape is
            the weight's and whose dtype is the owner's choice. Biases are small and always have ordinary gradients.
            "te" and "te_first" are TransformerEngine's rules, see `trimtab.experts.weight_grad`.
        delay_wgrad: weight and bias gradients are computed by `backward_dw()`, not by the backward.
        recipe: low precision, see `trimtab.experts.recipes`; `recipe_way` says whether it is emulated. Gradients keep
            the activations' dtype.
        kernels, dtype, device: as in `ExpertMLP`.

    Raises:
        ConfigError: sizes or options that do not fit together.
        BackendError: the recipe cannot run on the device.
    """

    def __init__(
        self, num_groups: int, in_features: int, out_features: int, *, bias: bool = True,
        dtype: torch.dtype | None = None, device: torch.device | str | int | None = None, single_parameter: bool = True,
        main_grad: MainGradMode = "off", delay_wgrad: bool = False, recipe: Recipe | None = None,
        kernels: KernelChoice | str = "auto",
    ) -> None:  # fmt: skip
        super().__init__(dtype=dtype, main_grad=main_grad, delay_wgrad=delay_wgrad, recipe=recipe, kernels=kernels)
        check_sizes(num_groups=num_groups, in_features=in_features, out_features=out_features)
        check_flags(bias=bias, single_parameter=single_parameter)
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.single_parameter, self.has_bias = single_parameter, bias
        shapes = {"weight": (out_features, in_features)} | ({"bias": (out_features,)} if bias else {})
        for name, shape in shapes.items():
            if self._stacked(name):
                new = torch.empty(num_groups, *shape, dtype=dtype, device=device)
                self.register_parameter(name, nn.Parameter(new))
                continue
            for i in range(num_groups):
                self.register_parameter(f"{name}{i}", nn.Parameter(torch.empty(shape, dtype=dtype, device=device)))
        self.recipe_state = self._new_state(num_groups)
        self.reset_parameters()

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """[G, out, in], or G of [out, in]."""
        return self._params("weight")

    @property
    def biases(self) -> tuple[Tensor, ...]:
        """[G, out], or G of [out], or nothing."""
        return self._params("bias") if self.has_bias else ()

    def _stacked(self, name: str) -> bool:
        """Whether "weight", or "bias", is one parameter."""
        return self.single_parameter

    def _params(self, name: str) -> tuple[Tensor, ...]:
        names = [name] if self._stacked(name) else [f"{name}{i}" for i in range(self.num_groups)]
        return tuple(getattr(self, n) for n in names)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Each group drawn as `nn.Linear` draws itself."""
        bound = 1 / math.sqrt(self.in_features)
        for param in (*self.weights, *self.biases):
            param.uniform_(-bound, bound)

    def forward(self, x_RD: Tensor, group_sizes: GroupSizes) -> Tensor:
        """[R, out_features] in x's dtype, computed in the weights' dtype or in autocast's, as `nn.Linear` is.

        Args:
            x_RD: [R, in_features] in float64, float32, bfloat16 or float16, R >= 0, grouped. Rows beyond the sum of
                the sizes may hold anything: their output is zero and so is their gradient.
            group_sizes: G of them, a list, NumPy array, CPU tensor or tensor on x's device (int32 or int64); the latter
                is never read by the host, but by torch in kernels "grouped_mm" of other dtypes than bfloat16.

        Raises:
            ConfigError: a parameter was cast to another dtype than x may have, or wraps other tensors.
            InputError: x or group_sizes do not have the form above, or do not fit each other; under `torch.func`.
            BackendError: the kernels fail their self-test, see `KernelChoice`.

        Under `torch.compile` it is operators of the graph; with a recipe, `main_grad`, delayed gradients or kernels of
        one's own it runs eagerly, between two graphs.
        """
        legal = dense(x_RD) and x_RD.ndim == 2 and x_RD.shape[1] == self.in_features
        if not legal or not holds_values(x_RD.dtype):
            wanted = f"floating [R, {self.in_features}], dense, in {VALUES}"
            raise InputError(f"x must be {wanted}, got {described(x_RD)}", phase="experts")
        self._refuse_unsupported((*self.weights, *self.biases))
        refuse_transforms("GroupedLinear")
        where, dtype = self._device(), computed_in(self.weights[0])
        if x_RD.device != where:
            raise InputError(f"x is on {x_RD.device}, the weights on {where}", phase="experts")
        offsets_e = offsets_of(group_sizes, self.num_groups, x_RD.shape[0], where)
        kernels = kernels_for(self.kernels, where, dtype)
        if kernels is None or self._has_state():
            y_RB = self._stateful(x_RD.to(dtype), offsets_e)
        else:
            y_RB = grouped_product(x_RD.to(dtype), self.grouped_weight(), offsets_e, kernels=kernels)
        return y_RB.to(x_RD.dtype)

    def grouped_weight(self) -> GroupedWeight:
        """The parameters as they are now, with what is added to the weight."""
        return self._adapted("weight", GroupedWeight(values=self.weights, biases=self.biases))

    @property
    def adaptable(self) -> tuple[str, ...]:
        """The weight, of one parameter or one per group."""
        return ("weight",)

    def stands_for(self, name: str) -> tuple[Sequence[int], torch.dtype]:
        """The shape and the dtype of the weight of all groups."""
        return (self.num_groups, self.out_features, self.in_features), self.weights[0].dtype

    def own_part(self, name: str) -> Any:
        """What this rank has of a parameter; of one per group all of them."""
        return self.weights if name == "weight" and not self._stacked(name) else super().own_part(name)

    @not_in_graphs
    def _stateful(self, x_RD: Tensor, offsets_e: Tensor) -> Tensor:
        kernels, weight = self.kernels.on(x_RD.device, x_RD.dtype), self.grouped_weight()
        sink = GradSink(self.main_grad, self._delayed.add if self.delay_wgrad else None)
        if self.recipe is None:
            return grouped_product(x_RD, weight, offsets_e, kernels=kernels, sink=sink)
        from trimtab.experts.low_precision import LowPrecisionProducts

        engine, state = self.engine_for(self._widths()), self.recipe_state
        assert state is not None
        plan = _aligned(offsets_e, x_RD.shape[0], (engine or self.recipe).alignment)
        low = LowPrecisionProducts(kernels, plan.offsets_e, state.call(), engine)
        y_SB = grouped_product(x_RD, weight, plan.offsets_e, plan=plan, kernels=kernels, sink=sink, low_precision=low)
        y_RB: Tensor = forward_of(ToExperts, y_SB, plan, True)
        return y_RB

    def _widths(self) -> Sequence[tuple[int, int]]:
        return [(self.in_features, self.out_features)]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("weight", "bias"):
            convert_state(state_dict, prefix, name, self.num_groups, stacked=self._stacked(name))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        shown = f"{self.num_groups} x ({self.in_features} -> {self.out_features}), bias={self.has_bias}"
        if not self.single_parameter:
            shown += ", single_parameter=False"
        return shown + self._options()


def convert_state(state: MutableMapping[str, Any], prefix: str, name: str, num_groups: int, *, stacked: bool) -> None:
    """Bring the entries of one parameter to the form asked for, in place: stacked, or separate.

    Entries that have the form already, or are not there at all, stay as they are.

    Raises:
        InputError: both forms at once, or not exactly `num_groups` groups.
    """
    whole = prefix + name
    part = re.compile(re.escape(whole) + r"(\d+)")
    found = sorted(int(match[1]) for key in state if (match := part.fullmatch(key)))
    if whole in state and found:
        raise InputError(f"state dict has both {whole} and {whole}{found[0]}: which one is meant?")
    if found and found != list(range(num_groups)):
        missing = sorted(set(range(num_groups)) - set(found))
        extra = sorted(set(found) - set(range(num_groups)))
        raise InputError(
            f"state dict has {len(found)} of {whole}*, expected {whole}0 .. {whole}{num_groups - 1}: "
            f"missing {missing}, unexpected {extra}"
        )
    if whole in state and state[whole].shape[:1] != (num_groups,):
        raise InputError(f"state dict has {whole} {tuple(state[whole].shape)}, expected {num_groups} groups")
    if stacked and found:
        state[whole] = torch.stack([state.pop(f"{whole}{i}") for i in found])
    if not stacked and whole in state:
        state.update({f"{whole}{i}": value for i, value in enumerate(state.pop(whole).unbind())})


def _aligned(offsets_e: Tensor, rows: int, alignment: int) -> ExpertPlan:
    """A plan that moves `rows` rows, segments at `offsets_e`, into aligned segments."""
    group_R = torch.searchsorted(offsets_e[1:], torch.arange(rows, device=offsets_e.device), right=True)
    return plan_experts(group_R[:, None], offsets_e.shape[0] - 1, alignment=alignment)
