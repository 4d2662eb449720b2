"""Import this before a program of `torch.export` is loaded in another process than it was made in: from then on the
operators of `MoE` and the names of its results are known.

Experts of transformers' models need `trimtab.integrations.transformers.compiled` as well.
"""

from __future__ import annotations

import trimtab.dispatch.checks
import trimtab.experts.compiled
import trimtab.experts.compiled_activation
import trimtab.experts.grouped_linear
import trimtab.moe  # noqa: F401
