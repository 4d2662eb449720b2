"""Without torchtitan, or with another one: one clear error. With a stand-in of its protocol: a class that fits."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from helpers.commands import run_python
from trimtab.errors import ConfigError
from trimtab.integrations.torchtitan.exchange import BASE, HOME, torchtitan_base


class Fits:
    """torchtitan's base class, by shape."""

    @dataclass
    class Config:
        num_experts: int
        top_k: int

    def dispatch(
        self, x_TD: Any, topk_scores_TK: Any, topk_expert_ids_TK: Any, num_local_tokens_per_expert_E: Any
    ) -> Any:
        """Not called."""

    def combine(self, routed_output_RD: Any, metadata: Any, x_TD: Any) -> Any:
        """Not called."""

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        """Not called."""


class OlderCombine(Fits):
    def combine(self, routed_output: Any, metadata: Any) -> Any:  # type: ignore[override]
        """Not called."""


class NoTopK(Fits):
    @dataclass
    class Config:
        num_experts: int


def stand_in(monkeypatch: pytest.MonkeyPatch, base: type | None) -> None:
    names = HOME.split(".")
    for i in range(1, len(names)):
        monkeypatch.setitem(sys.modules, ".".join(names[:i]), ModuleType(names[i - 1]))
    monkeypatch.setitem(sys.modules, HOME, SimpleNamespace() if base is None else SimpleNamespace(**{BASE: base}))  # type: ignore[arg-type]


def test_a_fitting_base_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, Fits)
    assert torchtitan_base() is Fits


@pytest.mark.parametrize(
    ("base", "said"),
    [
        (OlderCombine, r"combine\('routed_output', 'metadata'\), expected \('routed_output_RD', 'metadata', 'x_TD'\)"),
        (NoTopK, "no field 'top_k'"),
        (None, "has no attribute 'LocalTokenDispatcher'"),
    ],
)
def test_another_protocol_is_named(monkeypatch: pytest.MonkeyPatch, base: type | None, said: str) -> None:
    stand_in(monkeypatch, base)
    with pytest.raises(ConfigError, match=said):
        torchtitan_base()


def test_a_missing_torchtitan_is_named_when_it_is_needed() -> None:
    script = (
        "import sys; sys.modules['torchtitan'] = None\n"
        "import trimtab.integrations.torchtitan\nfrom trimtab.errors import ConfigError\n"
        "trimtab.integrations.torchtitan.TokenExchange(8, 2)\n"
        "try: trimtab.integrations.torchtitan.TokenDispatcher\n"
        "except ConfigError as error: print(error)\n"
    )
    done = run_python("-c", script, check=True)
    assert "pip install torchtitan" in done.stdout
    assert HOME in done.stdout
