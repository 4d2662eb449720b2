"""Functions of one's own between the products of experts, and norms behind them, run again for their backwards.

Legend: n rows, I width of the pre-activations (2F with a gate, else F), F expert hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn.utils import parametrize

from trimtab.autocast import noted
from trimtab.backward import eager_backward, forward_of
from trimtab.errors import InputError
from trimtab.experts.activations import Activation
from trimtab.experts.stand_in import standing_in
from trimtab.kernels.hidden import Gradients
from trimtab.kernels.memory import no_values


class Recomputed(Activation):
    """A differentiable row-wise function, run again for its backward.

    It runs under the autocast that this was made under. It must give the same twice: one that draws random numbers from
    torch's generator of the CPU, or of the CUDA device it runs on, is refused where a backward may come (not while a
    CUDA graph is captured), and what it uses must not be changed in place before the backward.

    Args:
        function: [n, I] -> [n, F], any number of rows including none.
        module: the one whose parameters it uses, if it uses any: it has these again in the backward, also where others
            have taken their place since (`torch.func.functional_call`). One that it does not use gets no gradient. A
            function that uses others, which would get none, is refused where a backward may come, unless it is the
            module itself.
        but: names of the module's parameters and children that it does not use, and that are none of it.
        beside: another module of which the same holds, perhaps a child of the first.
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        module: nn.Module | None = None,
        but: Collection[str] = (),
        beside: nn.Module | None = None,
    ) -> None:
        self.function = function
        found = [
            ((owner, name), p)
            for path, owner in ([] if module is None else module.named_modules())
            for name, p in owner._parameters.items()
            if p is not None and f"{path}.{name}".removeprefix(".").removeprefix(_COMPUTED).split(".")[0] not in but
        ]
        its = [] if beside is None else [(o, name, p) for o in beside.modules() for name, p in o._parameters.items()]
        near = [((owner, name), p) for owner, name, p in its if p is not None]
        # Of a module that is more than the function only the graph can tell what is used of it.
        self._steady = {p for _, p in (near if but else [*found, *near])}
        stand_ins = dict([*found, *near])
        self._places, self._stand_ins = list(stand_ins), list(stand_ins.values())
        self._own = tuple(dict.fromkeys(self._stand_ins))
        self._trained = [p for p in self._own if p.requires_grad]
        self._used: dict[int, bool] = {}
        self.params: tuple[Tensor, ...] = forward_of(_Used, self._used, *self._trained) if self._trained else ()
        inference = torch.is_inference_mode_enabled() or any(p.is_inference() for p in self._own)
        self._watch = function is not module and not inference
        self._versions = {p: p._version for p in self._own if not p.is_inference()}
        self._keep, self._tried, self._autocast = torch.is_grad_enabled(), False, noted()

    def forward(self, pre_nI: Tensor) -> Tensor:
        # Of a norm it is run in the backward as well.
        with standing_in(self._places, self._stand_ins), self._autocast(pre_nI.device.type), _uncached():
            if not self._keep or self._tried or no_values(pre_nI.device):
                return self.function(pre_nI)
            self._tried = True
            before = generators(pre_nI.device)
            h = self._watched(pre_nI) if self._watch else self.function(pre_nI)
            same = all(map(torch.equal, before, generators(pre_nI.device)))
            if same or torch.equal(h, self.function(pre_nI)):  # it may be another thread that drew
                return h
        raise InputError(
            "the experts' activation or norm draws random numbers, which its backward cannot draw again; "
            "transformers' own experts implementations keep what was drawn",
            phase="experts",
        )

    def _watched(self, pre_nI: Tensor) -> Tensor:
        """The function, with a graph that keeps no tensor and tells what a gradient would be wanted of.

        Raises:
            InputError: of something that is none of the parameters.
        """
        with torch.enable_grad(), saved_tensors_hooks(_nothing, _nothing):
            known = [get_gradient_edge(p).node for p in self._trained]
            h = self.function(pre_nI)
        seen, ahead = set(known), [h.grad_fn]
        while ahead:
            node = ahead.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            ahead += [before for before, _ in node.next_functions]
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                who = getattr(self.function, "__qualname__", type(self.function).__name__)
                raise InputError(
                    f"{who} uses a tensor of {tuple(leaf.shape)} that wants a gradient and is none that it may train: "
                    "neither a parameter of the experts module, other than its stacked weights, their biases and the "
                    "norm behind them, nor one of its act_fn. Give the module a parameter of its own for it, which "
                    "FSDP2 shards together with the module's others",
                    phase="experts",
                )
        return h.detach()

    def backward(self, pre_nI: Tensor, dh_nF: Tensor) -> Gradients:
        return self.again(pre_nI)[1](dh_nF)

    def again(self, pre_nI: Tensor) -> tuple[Tensor, Callable[[Tensor], Gradients]]:
        changed = [p for p, version in self._versions.items() if p._version != version]
        if any(p in self._steady for p in changed):
            raise _changed()
        own = self._without_hooks()
        with torch.enable_grad():
            # The graph tells whether it uses them. It may be the function that changes them, to count something.
            frozen = {p: p.detach().requires_grad_() for p in changed if not p.requires_grad and p.is_floating_point()}
            own |= {p: leaf.clone() for p, leaf in frozen.items()}
            stand_ins = [own[p] for p in self._stand_ins]
            with standing_in(self._places, stand_ins), self._autocast(pre_nI.device.type), _uncached():
                pre = pre_nI.detach().requires_grad_()
                # No leaf: within autograd.grad, hooks that torch's trackers hang on leaves raise.
                h = self.function(pre.view_as(pre))
        asked = {p: own[p] for p in self._trained} | frozen
        return h.detach(), partial(self._gradients, pre, h, asked, set(changed))

    def _without_hooks(self) -> dict[Tensor, Tensor]:
        """What each parameter is while it is run again. autograd.grad runs the hooks of what it is asked for, once a
        block, and autograd runs them on the sum: where a parameter has some, it is leaves of our own that are asked."""
        if any(p._backward_hooks or p.retains_grad for p in self._own):
            return {p: p.detach().requires_grad_(p.requires_grad) for p in self._own}
        return {p: p for p in self._own}

    def _gradients(
        self, pre_nI: Tensor, h_nF: Tensor, asked: dict[Tensor, Tensor], changed: set[Tensor], dh_nF: Tensor
    ) -> Gradients:
        given, found = [pre_nI, *asked.values()], list[Tensor | None]()
        found += torch.autograd.grad(h_nF, given, dh_nF.to(h_nF.dtype), allow_unused=True)
        d_pre, *d_asked = found
        if any(d is not None and p in changed for p, d in zip(asked, d_asked, strict=True)):
            raise _changed()
        d_trained = d_asked[: len(self._trained)]
        parts = list(zip(self._trained, d_trained, strict=True))
        for i, (p, d) in enumerate(parts):
            # autograd would hand None to the hooks of one that gets no gradient.
            hooked = p._backward_hooks or p._post_accumulate_grad_hooks
            self._used[i] = self._used.get(i, False) or d is not None or bool(hooked)
        d_params = [p.new_zeros(()).expand_as(p) if d is None else d for p, d in parts]
        return torch.zeros_like(pre_nI) if d_pre is None else d_pre, d_params


class _Used(Function):
    """The parameters, of which those that no block has used get no gradient, as without us, and not zeros, of which an
    optimizer would decay them. used: by number, filled by the blocks' backwards, which come first."""

    @staticmethod
    def forward(ctx: Any, used: dict[int, bool], *params: Tensor) -> tuple[Tensor, ...]:
        ctx.used = used
        return tuple(p.detach() for p in params)

    @staticmethod
    @eager_backward
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(grad if ctx.used.get(i, True) else None for i, grad in enumerate(grads))


def _changed() -> InputError:
    return InputError(
        "a parameter of the experts' activation or norm was changed in place between forward and backward",
        phase="experts",
    )


@contextmanager
def _uncached() -> Iterator[None]:
    """Within, `parametrize.cached` keeps and hands out nothing: what is computed here has no graph of use to others,
    and the graph of what others computed is theirs to free."""
    kept = parametrize._cache_enabled
    parametrize._cache_enabled -= kept
    try:
        yield
    finally:
        parametrize._cache_enabled += kept


_COMPUTED = "parametrizations."
"""Where a module has what a parameter of its own is computed from, under that one's name."""


def _nothing(_: Any) -> Any:
    """What is kept of a tensor that no backward will read."""
    return None


def generators(device: torch.device) -> list[Tensor]:
    """The states of torch's generators for what runs on `device`, all on the host; none while a graph is captured."""
    if device.type != "cuda":
        return [torch.get_rng_state()]
    if torch.cuda.is_current_stream_capturing():
        return []
    return [torch.get_rng_state(), torch.cuda.get_rng_state(device)]
