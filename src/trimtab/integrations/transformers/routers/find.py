"""Where a model of transformers decides: every router as a place with its layer, its rule and its selection bias.

Nothing of transformers is imported: a router is known by its class (`router_rules`), and watched or told by a wrapper
around the `forward` of that one module, which goes again.

Legend: E experts, K experts per token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.integrations.transformers.routers.rules import RULES, UNREACHABLE, Rule

_ENDINGS = ("TopKRouter", "TopkRouter", "Router", "Gate")
_BIASES = ("e_score_correction_bias", "expert_bias", "balancing_biases")
"""What families call the bias that joins the scores for the selection alone; in the router, or in the block around."""
_WRAPPERS = re.compile(r"^(module\.|base_model\.model\.)+|\b(_orig_mod|_checkpoint_wrapped_module)\.")


Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Wrapped:
    """What stands in front of one module's method until `remove`: around(method, args, kwargs) is called instead.

    tells: it changes what the method gives, and so goes beneath all that only look, whichever came first.
    owner: for whom.
    """

    def __init__(
        self, module: nn.Module, name: str, around: Around, *, tells: bool = False, owner: object = None
    ) -> None:
        self._module, self._name, self._around, self._tells, self.owner = module, name, around, tells, owner
        self._on, self._held = True, name in vars(module)
        self._before: Callable[..., Any] = getattr(module, name)
        over = self._top() if tells else None
        while over is not None and not over._tells and (next_ := _wrapper(over._before)) and not next_._tells:
            over = next_
        if over is None or over._tells:
            setattr(module, name, self._call)
        else:
            self._held, self._before = over._held, over._before
            over._held, over._before = True, self._call

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._before, args, kwargs) if self._on else self._before(*args, **kwargs)

    def _top(self) -> Wrapped | None:
        return _wrapper(vars(self._module).get(self._name))

    def remove(self) -> None:
        """The method is as before. Under another wrapper this one steps aside, and goes with that one."""
        self._on = False
        while (top := self._top()) is not None and not top._on:
            if top._held:
                setattr(self._module, self._name, top._before)
            else:
                delattr(self._module, self._name)


def wrappers(module: nn.Module, name: str) -> Iterator[Wrapped]:
    """What stands in front of a method, from the outermost on."""
    one = _wrapper(vars(module).get(name))
    while one is not None:
        if one._on:
            yield one
        one = _wrapper(one._before)


def _wrapper(method: Any) -> Wrapped | None:
    owner = getattr(method, "__self__", None)
    return owner if isinstance(owner, Wrapped) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class RouterPlace:
    """One router of a model of transformers.

    name: of the router module, without what wrappers (DDP, peft, torch.compile, checkpointing) add. module: it.
    family: its class.
    number: among the model's routers. layer: among all its layers, dense ones counted. layers: how many those are.
    num_experts: E, with what a family counts beside experts. top_k: K.
    rule: how logits become scores and weights.
    bias_in, bias: the module that has the selection bias and its name there, a buffer or a parameter that is not
        trained; "" without one.
    """

    name: str
    module: nn.Module
    family: str
    number: int
    layer: int
    layers: int
    num_experts: int
    top_k: int
    rule: Rule
    bias_in: nn.Module
    bias: str


def find_routers(model: nn.Module) -> list[RouterPlace]:
    """Every router of a model of transformers, in the order of the layers; none for a model without experts.

    Raises:
        ConfigError: experts whose router is of an unknown class, or of one that no choice can be handed to.
    """
    places: list[RouterPlace] = []
    modules = dict(model.named_modules())
    routed: set[str] = set()
    for name, module in modules.items():
        family = type(module).__name__
        refused = next((why for cls in type(module).__mro__ if (why := UNREACHABLE.get(cls.__name__))), None)
        if refused:
            raise ConfigError(f"{name} ({family}): its decisions cannot be recorded or replayed: {refused}")
        rule = _rule_of(module)
        if rule is None:
            continue
        around = _around(name)
        routed.add(around)
        layer, layers = _layer_of(name, modules)
        bias_in, bias = _bias_of(module, modules[around])
        places.append(
            RouterPlace(
                name=plain(name), module=module, family=family, number=len(places), layer=layer, layers=layers,
                num_experts=int(attrgetter(rule.classes)(module)), top_k=int(attrgetter(rule.top_k)(module)),
                rule=rule, bias_in=bias_in, bias=bias,
            )
        )  # fmt: skip
    for name, module in modules.items():
        if hasattr(module, "has_post_expert_norm") and (around := _around(name)) not in routed:
            inside = {key: type(child).__name__ for key, child in modules[around].named_children()}
            raise ConfigError(
                f"{name} ({type(module).__name__}): no router that trimtab knows among {inside}; if one of them gives "
                "(logits, weights, ids), add a row for it to trimtab.integrations.transformers.routers.rules.RULES"
            )
    return places


def plain(name: str) -> str:
    """A module's name without what wrappers add to it."""
    return _WRAPPERS.sub("", name)


def _around(name: str) -> str:
    """The block that a module is in, which peft's wrappers may have moved deeper."""
    return re.sub(r"(\.base_layer)+$", "", name).rpartition(".")[0]


def _rule_of(module: nn.Module) -> Rule | None:
    """By the module's class, or the nearest of its bases that has a row."""
    for cls in type(module).__mro__:
        for ending in _ENDINGS:
            found = RULES.get(cls.__name__.removesuffix(ending)) if cls.__name__.endswith(ending) else None
            if found is not None:
                return found if isinstance(found, Rule) else found(module)
    return None


def _layer_of(name: str, modules: dict[str, nn.Module]) -> tuple[int, int]:
    """The number in a module's name that counts layers, and how many of these there are."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return int(part), len(list(modules[".".join(parts[:i])].children()))
    return 0, 1


def _bias_of(router: nn.Module, block: nn.Module) -> tuple[nn.Module, str]:
    for owner in (router, getattr(router, "moe_statics", router), block):
        for name in _BIASES:
            if isinstance(getattr(owner, name, None), Tensor):
                return owner, name
    return router, ""
