"""Import this before a program of `torch.export` is loaded in another process than it was made in: from then on the
operators of `MoE` and the names of its results are known.

Experts of transformers' models need `trimtab.integrations.transformers.compiled` as well.
"""

from __future__ import annotations

import trimtab.dispatch.compiled
import trimtab.experts.compiled
import trimtab.experts.compiled_activation  # noqa: F401
from trimtab.moe import MoEOutput
from trimtab.routing.compiled import storable
from trimtab.routing.outcome import Routing

storable(MoEOutput)
storable(Routing)
