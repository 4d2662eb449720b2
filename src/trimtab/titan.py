"""The old name of `trimtab.integrations.torchtitan`, for one release."""

from __future__ import annotations

import warnings
from typing import Any

from trimtab.integrations import torchtitan

warnings.warn(
    "trimtab.titan is now trimtab.integrations.torchtitan; the old name goes with 0.3", DeprecationWarning, stacklevel=2
)


def __getattr__(name: str) -> Any:
    return getattr(torchtitan, name)
