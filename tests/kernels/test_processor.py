"""What is asked of the processor, of which the kernels' library, pages and ledgers speak."""

from __future__ import annotations

import platform
from pathlib import Path
from unittest.mock import Mock

import pytest

from trimtab.kernels.compiler import processor_facts, processor_name


def test_its_first_core_speaks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    one = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: A : B\npower management:\n"
    monkeypatch.setattr(Path, "read_text", lambda _: one + "\n" + one.replace("AMD", "ELSE") + "\n")
    assert processor_facts() == {
        "processor": "0", "vendor_id": "AuthenticAMD", "model name": "A : B", "power management": "",
    }  # fmt: skip
    assert processor_name() == "A : B"


def test_processors_of_one_name_are_told_apart_by_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: "cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n\n")
    assert processor_name() == "AMD EPYC (family 26, model 2)"


def test_other_systems_have_a_name_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=FileNotFoundError))
    monkeypatch.setattr(platform, "processor", lambda: "Intel64 Family 6, GenuineIntel")
    assert processor_facts() == {}
    assert processor_name() == "Intel64 Family 6, GenuineIntel"
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert processor_name() == platform.machine()
