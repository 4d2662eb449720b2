"""A recipe's state under expert parallelism: each rank has columns for its own experts, a state dict shows all.

    in the module    history_He [H, e]     what this rank computes with
    in a state dict  [H, E], a DTensor     Shard(1) over ep, so that it can be saved and loaded at any other ep

Copies of an expert on other data-parallel ranks, and its parts on etp ranks, have seen other tokens or other columns
and keep a history each; a state dict holds that of one of them.

Legend: H steps of history, E experts, e local experts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

OF_EXPERTS = "_He"
"""How the names of such buffers end."""


def share_state_dicts(module: nn.Module, mesh: DeviceMesh, ep_dim: int) -> None:
    """Have the state dicts of `module` hold its buffers of all experts. No communication."""
    cut: list[Placement] = [Shard(1) if dim == ep_dim else Replicate() for dim in range(mesh.ndim)]

    def ours(of: nn.Module, state: dict[str, Any], prefix: str) -> list[str]:
        own = [prefix + name for name, _ in of.named_buffers() if name.endswith(OF_EXPERTS)]
        return [key for key in own if key in state]

    def show(of: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key in ours(of, state, prefix):
            state[key] = DTensor.from_local(state[key], mesh, cut, run_check=False)

    def take(of: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for key in ours(of, state, prefix):
            whole: Tensor = state[key]
            state[key] = (
                whole.redistribute(mesh, cut).to_local()
                if isinstance(whole, DTensor)
                else whole.chunk(mesh.size(ep_dim), 1)[mesh.get_local_rank(ep_dim)]
            )

    module.register_state_dict_post_hook(show)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(take)  # type: ignore[no-untyped-call]
