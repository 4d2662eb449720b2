"""Optimizers that know which matrices a model's parameters are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.lazy_names import lazy_names

if TYPE_CHECKING:
    from trimtab.optim.layout import Layout as Layout
    from trimtab.optim.muon import Muon as Muon
    from trimtab.optim.muon import for_trainer as for_trainer
    from trimtab.optim.newton_schulz import KELLER as KELLER
    from trimtab.optim.newton_schulz import POLAR_EXPRESS as POLAR_EXPRESS
    from trimtab.optim.newton_schulz import gram as gram
    from trimtab.optim.newton_schulz import plain as plain

if not TYPE_CHECKING:  # or a type checker would let any name pass
    __getattr__, __dir__, __all__ = lazy_names(__name__)
