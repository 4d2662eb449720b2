"""What `torch.compile` needs: a check of a dispatcher's that is not compiled away.

Imported while a graph is traced and at no other time: importing it defines an operator `trimtab::checked_ids`, which
nothing that runs eagerly sees.

Legend: T tokens, K experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.dispatch.checks import assert_good, raise_if_bad


@torch.library.custom_op("trimtab::checked_ids", mutates_args=())
def checked_ids(ids_TK: Tensor, bad: Tensor, name: Tensor, num_experts: int) -> Tensor:
    """The ids, if `bad` is 0. What is made of them needs this operator, so that it stays in the graph.

    Raises:
        InputError: as `Dispatcher.dispatch`; on a device an assertion there.
    """
    layer = bytes(name.tolist()).decode(errors="replace").rstrip()
    if bad.device.type == "cpu":
        raise_if_bad([int(bad)], num_experts, layer=layer)
    else:
        assert_good(bad, num_experts, layer=layer)
    return ids_TK.clone()


@checked_ids.register_fake
def _(ids_TK: Tensor, bad: Tensor, name: Tensor, num_experts: int) -> Tensor:
    return torch.empty_like(ids_TK)
