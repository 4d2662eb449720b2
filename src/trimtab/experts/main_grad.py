"""Where one parameter's gradient goes, once per microbatch: to autograd, or into the parameter's `main_grad`.

    mode        the buffer is      kernels then     close() gives autograd       and sets
    off         a new buffer       overwrite it     that buffer
    accumulate  param.main_grad    add to it        a dummy of the full shape    param.grad_added_to_main_grad = True
    overwrite   param.main_grad    overwrite it     a dummy of the full shape    param.grad_added_to_main_grad = True

The dummy is there so that autograd's post-accumulate hooks fire as they would for a real gradient. Its memory is
not set: the hook's owner reads the flag and drops it. If the parameter has a true `zero_out_wgrad`, the dummy is
zeros, for owners that add it to something else; `main_grad` is never zeroed by that. A true `overwrite_main_grad`
on the parameter turns accumulate into overwrite for that parameter. These attribute names are Megatron-LM's.

An expert without tokens is in no row of the table: the kernels write zeros for it, or add zeros.

`accumulate` counts a parameter used twice in one graph twice, as it should; `overwrite` would keep the last use.
A backward that asks for the gradient of the input alone writes nothing, as `torch.autograd.grad(y, x)` and the
first half of a zero-bubble schedule's backward do. Delayed weight gradients wait for a `backward_dw()` of their own
after any backward: freeze the parameters for one that is to leave none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from trimtab.errors import ConfigError, InputError
from trimtab.validation import holds_values

MainGradMode = Literal["off", "accumulate", "overwrite"]
MODES = ("off", "accumulate", "overwrite")


def check_mode(mode: str) -> None:
    """Raises:
    ConfigError: no such mode.
    """
    if mode not in MODES:
        raise ConfigError(f"main_grad={mode!r} is not one of {MODES}")


class WeightGradient:
    """One parameter's gradient of one microbatch.

    Args:
        param: the parameter; with a floating `main_grad` of its shape, on its device, unless the mode is "off".
        mode: see the table above.
        name: what error messages call it.
        empty_like: makes the buffer where there is no `main_grad`.

    `buffer` is the tensor that the kernels write, of the parameter's shape: added to if `adds`, overwritten if not.

    Raises:
        InputError: the mode needs a `main_grad` and the parameter has none of its shape, on its device, floating,
            with a place for each element.
    """

    def __init__(
        self,
        param: Tensor,
        mode: MainGradMode,
        name: str = "weight",
        empty_like: Callable[[Tensor], Tensor] = torch.empty_like,
    ) -> None:
        self.param, self.name = param, name
        self.fused = mode != "off"
        self.adds = mode == "accumulate" and not getattr(param, "overwrite_main_grad", False)
        self.buffer = self._main_grad() if self.fused else empty_like(param)

    def close(self) -> Tensor:
        """What autograd gets once the buffer is written: full shape, the parameter's dtype."""
        if not self.fused:
            return self.buffer
        self.param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        zeros = getattr(self.param, "zero_out_wgrad", False) or torch.is_anomaly_enabled()  # which looks for NaN
        return torch.zeros_like(self.param) if zeros else torch.empty_like(self.param)

    def _main_grad(self) -> Tensor:
        param, main_grad = self.param, getattr(self.param, "main_grad", None)
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
