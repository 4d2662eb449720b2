"""What the host reads of a device, as something that a guard can wait for."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
from torch import Tensor

_SPIN = 2e-3
"""Seconds in which the host asks again at once: as long as an exchange of counts takes."""


class Arrival:
    """A copy of a device's tensor in pinned memory, `values`, which is there once the event behind it is. No collective
    on a device fails by itself where a rank is lost: the event just never comes."""

    def __init__(self, tensor: Tensor) -> None:
        self.values = tensor.to("cpu", non_blocking=True)  # pinned
        self._event = torch.accelerator.current_stream(tensor.device).record_event()

    def wait(self, timeout: timedelta) -> None:
        start, pause = time.monotonic(), 0.0
        while not self.is_completed():
            if (waited := time.monotonic() - start) > timeout.total_seconds():
                raise RuntimeError("the device has not come to what the host reads")
            time.sleep(pause)
            pause = 0.0 if waited < _SPIN else 1e-4

    def is_completed(self) -> bool:
        """Raises RuntimeError: an error of the device's own."""
        return bool(self._event.query())
