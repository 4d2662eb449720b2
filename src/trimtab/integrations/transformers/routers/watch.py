"""One watcher of a model's routers for all that look at them: recordings, loads, balance.

Each router's `forward` is wrapped once, however many look. That is beneath all hooks, of which those of transformers'
expert parallelism make ids local; and where wrappers change, a compiled model is traced anew, which for hooks alone it
would not be.

Legend: T tokens of this rank, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trimtab.autograd import in_backward, not_in_graphs
from trimtab.integrations.transformers.routers.find import RouterPlace, Wrapped, wrappers
from trimtab.routing.recompute import replaying
from trimtab.routing.scores import count_ids


class Forward:
    """One forward of the model. shape: (sequences, positions) of its input, where that has them. vision_T: which tokens
    have experts of their own, where a family parts them by modality. turns: how often each router has decided in it."""

    def __init__(self, shape: tuple[int, int] | None, vision_T: Tensor | None, turns: dict[str, int]) -> None:
        self.shape, self.vision_T, self.turns = shape, vision_T, turns

    def name(self, router: str) -> str:
        """The name of the call that a router is in: NAME#2 where it decides for the second time."""
        turn = self.turns.get(router, 1)
        return router if turn == 1 else f"{router}#{turn}"

    def rows(self, name: str) -> Tensor | None:
        """Which of the tokens the router sees: bool [T], None for all."""
        if self.vision_T is None:
            return None
        return self.vision_T if ".vision_moe." in name else ~self.vision_T if ".text_moe." in name else None

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forward:
        """From what the model is called with."""
        named = (kwargs.get(key) for key in ("input_ids", "inputs_embeds"))
        tokens = next((t for t in (*named, *args) if isinstance(t, Tensor) and t.dim() >= 2), None)
        vision = kwargs.get("moe_mm_token_type_ids")
        parted = vision.bool().flatten() if isinstance(vision, Tensor) else None
        return cls(None if tokens is None else (tokens.shape[0], tokens.shape[1]), parted, {})


class FirstRuns:
    """Which runs of one module are to be counted: those that train, with gradients, and each once under recompute. Of a
    reentrant checkpoint that is the second run, for the first one has no gradients."""

    def __init__(self) -> None:
        self._had_forward = False

    def here(self, module: nn.Module) -> bool:
        """Whether the run that is under way is one."""
        if not module.training or not torch.is_grad_enabled() or replaying():
            return False
        if in_backward():
            return not self._had_forward
        self._had_forward = True
        return True


class Seen:
    """One run of a router.

    place: the router. name: of this run. forward: of the model, None behind it. again: that runs for the second time.
    outputs: what the router gives; who looks may put others in their place.
    logits_TE, weights_TK, ids_TK: in them; ids are int64, or int32.
    """

    def __init__(self, watch: Watch, place: RouterPlace, name: str, outputs: Any) -> None:
        self._watch, self.place, self.name, self.outputs = watch, place, name, outputs
        self.forward, self.again = watch.forward, watch.again
        self.logits_TE, self.weights_TK, self.ids_TK = place.rule.read(place.module, outputs)

    @cached_property
    def first(self) -> bool:
        """Whether it is to be counted, see `FirstRuns`."""
        return self._watch.first[self.place.name].here(self.place.module)

    @cached_property
    def real_T(self) -> Tensor | None:
        """Which tokens are no padding, bool, as the model's 2-d `attention_mask` says; None where all are, or where the
        router sees others than those of the mask (of an image, say)."""
        mask = self._watch.mask
        known = mask is not None and mask.numel() == self.ids_TK.shape[0]
        return mask.flatten().bool().to(self.ids_TK.device) if mask is not None and known else None

    @cached_property
    def chosen_TK(self) -> Tensor:
        """Ids int64, -1 for padding."""
        ids = self.ids_TK.detach().long()
        return ids if self.real_T is None else ids.masked_fill(~self.real_T[:, None], -1)

    @cached_property
    def chosen_E(self) -> Tensor:
        """Slots per expert, without padding."""
        return count_ids(self.chosen_TK, self.place.num_experts)

    @cached_property
    def scores_TE(self) -> Tensor:
        """Of all experts, without bias and group limits; differentiable."""
        return self.place.rule.scores(self.place.module, self.logits_TE)


class Look(NamedTuple):
    """Who looks. see: called in every run of a router, recomputes too. ends: where the model's forward has ended.
    traced: in the graphs of `torch.compile`; others run between them."""

    see: Callable[[Seen], None] | None = None
    ends: Callable[[Forward], None] | None = None
    traced: bool = False


class Watch:
    """A model's routers, seen while anybody looks.

    Attributes:
        forward: the one that is under way, None behind it. again: a part of it runs for the second time.
        mask: the `attention_mask` of the last one.
        first: by router.
    """

    def __init__(self, model: nn.Module, places: Sequence[RouterPlace]) -> None:
        self._model, self._places = model, places
        self.forward: Forward | None = None
        self.again = False
        self.mask: Tensor | None = None
        self.first = {place.name: FirstRuns() for place in places}
        self._looks: list[Look] = []
        self._installed: list[Any] = []

    @classmethod
    def of(cls, model: nn.Module, places: Sequence[RouterPlace]) -> Watch:
        """The one that looks at the model already, or a new one."""
        owners = (wrapped.owner for wrapped in wrappers(places[0].module, "forward"))
        return next((one for one in owners if isinstance(one, cls) and one._model is model), None) or cls(model, places)

    def add(self, look: Look) -> Callable[[], None]:
        """Let somebody look; returns what ends it."""
        if not self._looks:
            self._installed = [
                self._model.register_forward_pre_hook(self._begins, with_kwargs=True, prepend=True),
                self._model.register_forward_hook(self._ends, always_call=True),
                *(Wrapped(place.module, "forward", partial(self._run, place), owner=self) for place in self._places),
            ]
        self._looks.append(look)
        return partial(self._leave, look)

    def _leave(self, look: Look) -> None:
        self._looks = [one for one in self._looks if one is not look]
        if not self._looks:
            for one in reversed(self._installed):
                one.remove()
            self._installed = []

    def _begins(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.forward = Forward.of(args, kwargs)
        mask = kwargs.get("attention_mask")
        self.mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None

    def _ends(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        now, self.forward = self.forward, None
        for look in self._looks:
            if look.ends is not None and now is not None and output is not None:
                look.ends(now)

    def _run(self, place: RouterPlace, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        now, name = self.forward, place.name
        if now is not None:
            now.turns[name] = now.turns.get(name, 0) + 1
            name = now.name(name)
        outputs = forward(*args, **kwargs)
        if not any(look.see for look in self._looks):
            return outputs
        seen = Seen(self, place, name, outputs)
        self._show(seen, traced=True)
        if not all(look.traced for look in self._looks if look.see):
            self._between_graphs(seen)
        return seen.outputs

    @not_in_graphs
    def _between_graphs(self, seen: Seen) -> None:
        self._show(seen, traced=False)

    def _show(self, seen: Seen, traced: bool) -> None:
        for look in self._looks:
            if look.see is not None and look.traced == traced:
                look.see(seen)
