"""The old name of `trimtab.integrations.transformers`, for one release."""

from __future__ import annotations

import warnings

from trimtab.integrations.transformers import register as register

warnings.warn(
    "trimtab.hf is now trimtab.integrations.transformers; the old name goes with 0.3", DeprecationWarning, stacklevel=2
)
