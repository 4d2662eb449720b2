"""How a run ends: a signal ends it as such, whatever fails because of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from trimtab.processes import Interrupted, signals_raise


class Stopper:
    """What asks the process to stop while it is written."""

    def __reduce__(self) -> tuple[type[Stopper], tuple[()]]:
        os.kill(os.getpid(), signal.SIGTERM)
        return Stopper, ()


def cut_off_by(number: signal.Signals) -> None:
    """As torch.save, whose file ends in an error where it was cut off."""
    with signals_raise():
        try:
            os.kill(os.getpid(), number)
        finally:
            raise RuntimeError("unexpected pos 582 vs 466")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_failure_that_follows_from_a_signal_is_the_signal(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as raised:
        cut_off_by(number)
    assert raised.value.number == number
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert signal.getsignal(number) is before


def test_a_file_that_is_cut_off_while_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(Interrupted), signals_raise():
        torch.save({"state": Stopper()}, tmp_path / "file.pt")


def test_a_failure_without_a_signal_is_that_failure() -> None:
    with pytest.raises(RuntimeError, match="on its own"), signals_raise():
        raise RuntimeError("on its own")
