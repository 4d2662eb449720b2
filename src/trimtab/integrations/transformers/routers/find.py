"""Where a model of transformers decides: every router as a place with its layer, its rule and its selection bias.

Nothing of transformers is imported: a router is known by its class (`routers.rules`).

Legend: E experts, K experts per token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from trimtab.checkpoint.state import plain_name
from trimtab.errors import ConfigError
from trimtab.integrations.transformers.routers.rules import RULES, UNREACHABLE, Rule
from trimtab.integrations.transformers.summary import own_name
from trimtab.routing.port import RouterInfo

_ENDINGS = ("TopKRouter", "TopkRouter", "Router", "Gate")
_BIASES = ("e_score_correction_bias", "expert_bias", "balancing_biases")
"""What families call the bias that joins the scores for the selection alone; in the router, or in the block around."""
_OUTER = re.compile(r"^(module\.|base_model\.model\.)+")
_WHOLE = re.compile(r"\.(?:original_module|modules_to_save\.([^.]+))(?=\.|$)")
"""What a name has behind that of a module which peft saves whole, and of which it keeps others: whose this one is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RouterPlace:
    """One router of a model of transformers.

    name: of the router module, without what wrappers (DDP, peft, torch.compile, checkpointing) add. module: it.
    others: those that may run in its place, of which peft keeps one for each of its own where it saves a router whole.
    family: its class.
    layer: its number among all layers, dense ones counted. layers: how many those are.
    num_experts: E, with what a family counts beside experts. top_k: K.
    rule: how logits become scores and weights.
    bias_in, bias: the module that has the selection bias and its name there, a buffer or a parameter that is not
        trained; "" without one.
    """

    name: str
    module: nn.Module
    others: tuple[nn.Module, ...]
    family: str
    layer: int
    layers: int
    num_experts: int
    top_k: int
    rule: Rule
    bias_in: nn.Module
    bias: str

    @property
    def info(self) -> RouterInfo:
        """For observers."""
        return RouterInfo(
            name=self.name, num_experts=self.num_experts, top_k=self.top_k, score=self.rule.score, family=self.family,
            holes=False,
        )  # fmt: skip


def find_routers(model: nn.Module) -> list[RouterPlace]:
    """Every router of a model of transformers, in the order of the layers; none for a model without experts.

    Raises:
        ConfigError: experts whose router is of an unknown class, or of one that no choice can be handed to.
    """
    places: list[RouterPlace] = []
    modules = dict(model.named_modules())
    by_plain_name = {plain(name): module for name, module in modules.items()}  # of wrappers the innermost
    found: dict[str, list[tuple[str, Rule]]] = {}
    for name, module in modules.items():
        refused = next((why for cls in type(module).__mro__ if (why := UNREACHABLE.get(cls.__name__))), None)
        if refused:
            family = type(module).__name__
            raise ConfigError(f"{name} ({family}): its decisions cannot be recorded or replayed: {refused}")
        rule = _rule_of(module)
        if rule is not None:
            found.setdefault(plain(name), []).append((name, rule))
    for plainly, several in found.items():
        name, rule = next((one for one in several if _is_active(one[0], modules)), several[0])
        module = modules[name]
        layer, layers = _layer_of(name, modules)
        bias_in, bias = _bias_of(module, by_plain_name[around(plainly)])
        places.append(
            RouterPlace(
                name=plainly, module=module, others=tuple(modules[other] for other, _ in several if other != name),
                family=type(module).__name__, layer=layer, layers=layers,
                num_experts=int(attrgetter(rule.classes)(module)), top_k=int(attrgetter(rule.top_k)(module)),
                rule=rule, bias_in=bias_in, bias=bias,
            )
        )  # fmt: skip
    routed = set(map(around, found))
    for name, module in modules.items():
        if hasattr(module, "has_post_expert_norm") and (block := around(name)) not in routed:
            inside = {key: type(child).__name__ for key, child in by_plain_name[block].named_children()}
            raise ConfigError(
                f"{name} ({type(module).__name__}): no router that trimtab knows among {inside}; if one of them gives "
                "(logits, weights, ids), add a row for it to trimtab.integrations.transformers.routers.rules.RULES"
            )
    return places


def plain(name: str) -> str:
    """A module's name without what DDP, peft, torch.compile and checkpointing add to it."""
    return _WHOLE.sub("", own_name(_OUTER.sub("", plain_name(name))))


def around(name: str) -> str:
    """The plain name of the block that a router or experts module is in, whatever wraps them."""
    return plain(name).rpartition(".")[0]


def _is_active(name: str, modules: dict[str, nn.Module]) -> bool:
    """Whether a module is the one that runs, of those that peft keeps where it saves a module whole."""
    for kept in _WHOLE.finditer(name):
        wrapper: Any = modules[name[: kept.start()]]
        active = () if wrapper.disable_adapters else wrapper.active_adapters
        if not (kept[1] in active if kept[1] else not active):
            return False
    return True


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
