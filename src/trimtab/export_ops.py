"""Import this before a program of `torch.export` is loaded in another process than it was made in: from then on the
operators of `MoE` and the names of its results are known.
"""

from __future__ import annotations

import trimtab.dispatch.checks
import trimtab.experts.expert_ops
import trimtab.experts.plan
import trimtab.experts.product_ops
import trimtab.experts.segments
import trimtab.moe  # noqa: F401
