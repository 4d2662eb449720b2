"""Where one parameter's gradient goes, once per microbatch: to autograd or into `param.main_grad`; now or later.

    mode        the buffer is      kernels then     close() gives autograd       and sets
    off         a new buffer       overwrite it     that buffer
    accumulate  param.main_grad    add to it        a dummy of the full shape    param.grad_added_to_main_grad = True
    overwrite   param.main_grad    overwrite it     a dummy of the full shape    param.grad_added_to_main_grad = True
    te          param.main_grad    add to it        as accumulate if the parameter has the attribute, else nothing
    te_first    param.main_grad    overwrite it     the same

The attribute names are Megatron-LM's. The dummy fires autograd's post-accumulate hooks as a real gradient would; its
memory is not set, but zeros if the parameter has a true `zero_out_wgrad`. A true `overwrite_main_grad` on the parameter
turns accumulate into overwrite for it; Megatron's FSDP makes the buffer when it is asked for. For an expert without
tokens the kernels write zeros, or add none.

`accumulate` counts a parameter used twice in one graph twice, as it should; `overwrite` would keep the last use. A
backward that asks for the gradient of the input alone, as the first half of a zero-bubble schedule's, writes nothing;
delayed gradients wait for a `backward_dw()` of their own after any backward. "te" is what TransformerEngine does, for
`trimtab.integrations.transformer_engine` alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from trimtab.autograd import without_autocast
from trimtab.errors import InputError
from trimtab.validation import holds_values

MainGradMode = Literal["off", "accumulate", "overwrite", "te", "te_first"]
MODES = ("off", "accumulate", "overwrite")
MAIN_GRAD_NAMES = ("main_grad", "overwrite_main_grad", "zero_out_wgrad")
"""What a view that stands for a parameter must have of it."""

WgradJob = Callable[[], list[tuple[Tensor, Tensor]]]
"""Gives the parameters that want a gradient, each with what autograd gets for it."""

Defer = Callable[[WgradJob, Sequence[Tensor]], None]
"""Takes such a job, and the tensors of others that it will read."""


class WeightGradient:
    """One parameter's gradient of one microbatch.

    Args:
        param: the parameter. A frozen one counts as "off"; its gradient is the caller's to drop.
        mode: see the table above.
        name: what error messages call it.
        empty_like: makes the buffer where there is no `main_grad`.

    `buffer` is the tensor that the kernels write, of the parameter's shape: added to if `adds`, overwritten if not.
    `silent`: autograd is to get nothing.

    Raises:
        InputError: the mode needs a `main_grad` and the parameter has none of its shape, on its device, floating,
            with a place for each element.
    """

    def __init__(
        self,
        param: Tensor,
        mode: MainGradMode,
        name: str,
        empty_like: Callable[[Tensor], Tensor] = torch.empty_like,
    ) -> None:
        self.param, self.name = param, name
        self.fused = mode != "off" and param.requires_grad
        self.silent = self.fused and mode in ("te", "te_first") and not hasattr(param, "grad_added_to_main_grad")
        self.adds = self.fused and mode in ("accumulate", "te") and not getattr(param, "overwrite_main_grad", False)
        self.buffer = self._main_grad() if self.fused else empty_like(param)

    def close(self) -> Tensor:
        """What autograd gets once the buffer is written: full shape, the parameter's dtype."""
        if not self.fused:
            return self.buffer
        self.param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        zeros = getattr(self.param, "zero_out_wgrad", False) or torch.is_anomaly_enabled()  # which looks for NaN
        return torch.zeros_like(self.param) if zeros else torch.empty_like(self.param)

    def _main_grad(self) -> Tensor:
        param = self.param
        if hasattr(param, "__fsdp_param__"):
            param.main_grad = param.get_main_grad()  # type: ignore[attr-defined]
        main_grad = getattr(param, "main_grad", None)
        found = main_grad
        if isinstance(main_grad, Tensor):
            fits = main_grad.shape == param.shape and main_grad.device == param.device
            strides = zip(main_grad.stride(), main_grad.shape, strict=True)
            expanded = any(stride == 0 and size > 1 for stride, size in strides)
            if fits and holds_values(main_grad.dtype) and not expanded:
                return main_grad
            found = f"{tuple(main_grad.shape)} {main_grad.dtype} on {main_grad.device}{', expanded' * expanded}"
        raise InputError(
            f"{self.name}.main_grad is {found}, expected a floating tensor {tuple(param.shape)} on {param.device}: "
            "main_grad='accumulate' and 'overwrite' write there. Set it before the backward or use 'off', as for a "
            "parametrized weight, which is a new tensor at each use",
            phase="experts",
        )


class DelayedGradients:
    """The work that the backwards of one module left, oldest first. A copy of the module begins without any."""

    def __init__(self) -> None:
        self._jobs: deque[WgradJob] = deque()

    def __reduce__(self) -> tuple[Any, ...]:
        return DelayedGradients, ()

    def __bool__(self) -> bool:
        """Whether a backward waits."""
        return bool(self._jobs)

    def add(self, job: WgradJob, reads: Sequence[Tensor]) -> None:
        """Called by a backward. reads: the tensors of others that the job will read."""
        self._jobs.append(unchanged(job, reads))

    def waiting(self) -> bool:
        """Whether a backward's gradients have not been asked for yet."""
        return bool(self._jobs)

    def run(self) -> None:
        """The gradients of the oldest backward that has not had them yet; hooks fire now.

        Raises:
            InputError: no backward is waiting; or what it is to read was changed in place since.
        """
        if not self._jobs:
            raise InputError("backward_dw() without a backward before it", phase="experts")
        job = self._jobs.popleft()
        with torch.no_grad(), without_autocast():
            found = [(param, gradient) for param, gradient in job() if param.requires_grad]
        torch.autograd.backward([param for param, _ in found], [gradient for _, gradient in found])


def unchanged(job: WgradJob, reads: Sequence[Tensor]) -> WgradJob:
    """The job, which raises InputError if a tensor that it reads was changed in place meanwhile."""
    versions = [(t, t._version) for t in reads if not t.is_inference()]

    def run() -> list[tuple[Tensor, Tensor]]:
        changed = [tuple(t.shape) for t, version in versions if t._version != version]
        if changed:
            raise InputError(
                f"a tensor {changed[0]} that backward_dw() needs was changed in place since the backward: hand the "
                "layer a copy, or call backward_dw() before the buffer is used again",
                phase="experts",
            )
        return job()

    return run


def anchor(like: Tensor, wanted: bool) -> Tensor:
    """Stands in for parameters that autograd must not meet: it would fire their hooks now, without a gradient.

    An empty tensor that wants a gradient, so that there is a backward even where no other input needs one.
    """
    return like.new_empty(0).requires_grad_(wanted)
