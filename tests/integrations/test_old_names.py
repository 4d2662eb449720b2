"""Names of before 0.2 work for one release, and say so."""

from __future__ import annotations

import importlib
import sys

import pytest

from trimtab.integrations import torchtitan, transformers


def test_old_names_are_the_new_ones() -> None:
    for name in ("trimtab.hf", "trimtab.titan"):
        sys.modules.pop(name, None)
        with pytest.warns(DeprecationWarning, match=rf"^{name} is now trimtab\.integrations\."):
            importlib.import_module(name)
    assert sys.modules["trimtab.hf"].register is transformers.register
    assert sys.modules["trimtab.titan"].TokenExchange is torchtitan.TokenExchange
