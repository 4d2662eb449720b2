"""What `GroupedLinear` and `ExpertMLP` have in common: weight gradients that may wait, and a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.experts.weight import GroupedWeight, LoraFactors
from trimtab.experts.weight_grad import MODES, DelayedGradients, MainGradMode
from trimtab.kernels.choose import KernelChoice
from trimtab.kernels.tensor_checks import unsupported_dtype
from trimtab.validation import VALUES, check_dtype, check_flags

if TYPE_CHECKING:
    from trimtab.experts.recipes.base import Recipe, RecipeState, Way
    from trimtab.experts.recipes.hardware import Engine


def check_options(
    *, dtype: torch.dtype | None, main_grad: str, delay_wgrad: bool, recipe: Recipe | None, kernels: KernelChoice | str
) -> KernelChoice:
    """The kernels' choice, if a `GroupedModule` can have all these, whatever its device and widths.

    Raises:
        ConfigError: one of them is none.
    """
    check_dtype(dtype)
    check_flags(delay_wgrad=delay_wgrad)
    if main_grad not in MODES:
        raise ConfigError(f"main_grad={main_grad!r} is not one of {MODES}")
    if recipe is not None and (isinstance(recipe, type) or not hasattr(recipe, "engine")):
        one = "MXFP8(backend='auto')"
        raise ConfigError(f"recipe={recipe!r} is no recipe: hand in one of trimtab.experts.recipes, as {one}")
    if not isinstance(kernels, (str, KernelChoice)):
        raise ConfigError(f"kernels={kernels!r} is neither a name nor a KernelChoice, which takes kernels as well")
    return KernelChoice(kernels) if isinstance(kernels, str) else kernels


class GroupedModule(nn.Module):
    """Args are those of the modules that derive from it, which describe them."""

    def __init__(
        self, *, dtype: torch.dtype | None, main_grad: MainGradMode, delay_wgrad: bool, recipe: Recipe | None,
        kernels: KernelChoice | str,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kernels = check_options(
            dtype=dtype, main_grad=main_grad, delay_wgrad=delay_wgrad, recipe=recipe, kernels=kernels
        )
        self.main_grad, self.delay_wgrad, self.recipe = main_grad, delay_wgrad, recipe
        self._delayed = DelayedGradients()
        self.active_adapters: tuple[str, ...] = ()

    @property
    def adaptable(self) -> tuple[str, ...]:
        """The weights that may have adapters, by name: stacked ones."""
        raise NotImplementedError

    def stands_for(self, name: str) -> tuple[Sequence[int], torch.dtype]:
        """The shape and the dtype of a weight."""
        weight = self.get_parameter(name)
        return weight.shape, weight.dtype

    def own_part(self, name: str) -> Tensor:
        """What this rank has of a parameter."""
        return self.get_parameter(name)

    def put_adapter(self, name: str, weights: Sequence[str], options: Mapping[str, Any]) -> None:
        """Add an adapter of these weights, see `lora.ExpertAdapter`, and make it the active one."""
        from trimtab.experts.lora import ExpertAdapter

        if not hasattr(self, "adapters"):
            self.adapters = nn.ModuleDict()
        self.adapters[name] = ExpertAdapter({own: self.stands_for(own) for own in weights}, self._device(), **options)
        self.active_adapters = (name,)

    def _lora(self) -> Mapping[str, LoraFactors | None]:
        """The sum of the active adapters' factors."""
        from trimtab.experts.lora import factors_of, in_use

        adapters = in_use(self)
        return factors_of(self, adapters, [dict(adapter.named_parameters()) for adapter in adapters])

    def _adapted(self, name: str, weight: GroupedWeight) -> GroupedWeight:
        """The weight of this name with the active adapters' factors."""
        weight.lora = self._lora()[name] if self.active_adapters else None
        return weight

    def _refuse_unsupported(self, params: Iterable[Tensor | None]) -> None:
        """Raises:
        ConfigError: a parameter was cast to a dtype that is not computed with, or wraps other tensors.
        """
        for param in params:
            if param is not None and (held := unsupported_dtype(param)):
                raise ConfigError(
                    f"{type(self).__name__} has a parameter of {tuple(param.shape)} in {held}: keep parameters in "
                    f"{VALUES}, as plain tensors; a recipe of trimtab.experts.recipes rounds what is multiplied",
                    phase="experts",
                )

    def _has_state(self) -> bool:
        """Whether an option has state that a graph of `torch.compile` does not see."""
        return self.main_grad != "off" or self.delay_wgrad or self.recipe is not None

    def _widths(self) -> Sequence[tuple[int, int]]:
        """(in, out) features of each product."""
        raise NotImplementedError

    def _device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    def backward_dw(self) -> None:
        """Weight and bias gradients of the oldest backward that has not had them yet; hooks fire now.

        Does nothing without `delay_wgrad`: the backward has already done it. Called on another CUDA stream than
        the backward's, it waits for that one; the optimizer's stream must then wait for the caller's.

        Raises:
            InputError: no backward is waiting.
        """
        if self.delay_wgrad:
            self._delayed.run()

    @property
    def recipe_way(self) -> Way | None:
        """How the recipe's products are computed where the parameters are: "hardware" or "emulated"."""
        if self.recipe is None:
            return None
        return "emulated" if self.engine_for(self._widths()) is None else "hardware"

    def engine_for(self, widths: Sequence[tuple[int, int]]) -> Engine | None:
        """The recipe's hardware for weights of these (in, out) features where the parameters are; None where one of
        them is emulated, and without a recipe.

        Raises:
            BackendError: the recipe cannot work there.
        """
        if self.recipe is None:
            return None
        ways = {self.recipe.check(self._device(), *width) for width in widths}
        return self.recipe.engine() if ways == {"hardware"} else None

    def _new_state(self, num_groups: int) -> RecipeState | None:
        """A fresh state of the recipe, for one weight.

        Raises:
            BackendError: the recipe cannot work where the parameters are.
        """
        if self.recipe is None:
            return None
        self.engine_for(self._widths())
        state = self.recipe.state().to(self._device())
        state.reserve(num_groups)
        return state

    def _options(self) -> str:
        """For `extra_repr`, what is not as by default."""
        shown = "" if self.main_grad == "off" else f", main_grad={self.main_grad!r}"
        shown += ", delay_wgrad=True" if self.delay_wgrad else ""
        return shown if self.recipe is None else f"{shown}, recipe={self.recipe.name} ({self.recipe_way})"
