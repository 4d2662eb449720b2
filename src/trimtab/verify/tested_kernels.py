"""What ranks inherit from the server that forks them: the compiled kernels, built, loaded and tested once.

That server imports it, and nobody else: a server can be told of nothing else to do beforehand.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from trimtab.kernels.compiled import compiled_kernels
from trimtab.kernels.fused_check import first_fused_fault

torch.set_num_threads(1)  # OpenMP's threads are lost in a fork, and waited for
KEPT = []
with suppress(Exception):  # a rank that needs them asks again, and can say what is wrong
    KEPT.append(compiled_kernels())
    KEPT[0].fault_by(first_fused_fault)
