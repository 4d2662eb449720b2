"""trimtab: Mixture-of-Experts for PyTorch with the right numbers, however the tokens fall.

Names are imported when they are first used, so that the command line starts without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.lazy_names import lazy_names

if TYPE_CHECKING:
    from trimtab import checkpoint as checkpoint
    from trimtab import integrations as integrations
    from trimtab import optim as optim
    from trimtab.dispatch.all_gather import AllGather as AllGather
    from trimtab.dispatch.all_to_all import AllToAll as AllToAll
    from trimtab.dispatch.dispatcher import Dispatcher as Dispatcher
    from trimtab.dispatch.route import Dispatched as Dispatched
    from trimtab.dispatch.shared_memory import SharedMemory as SharedMemory
    from trimtab.dispatch.transports import Auto as Auto
    from trimtab.errors import BackendError as BackendError
    from trimtab.errors import ConfigError as ConfigError
    from trimtab.errors import DesyncError as DesyncError
    from trimtab.errors import InputError as InputError
    from trimtab.errors import PeerLost as PeerLost
    from trimtab.errors import PhaseTimeout as PhaseTimeout
    from trimtab.errors import TrimtabError as TrimtabError
    from trimtab.experts.linear import GroupedLinear as GroupedLinear
    from trimtab.experts.lora import add_adapter as add_adapter
    from trimtab.experts.lora import merge_adapter as merge_adapter
    from trimtab.experts.lora import set_adapter as set_adapter
    from trimtab.experts.module import ExpertMLP as ExpertMLP
    from trimtab.guard.guard import Guard as Guard
    from trimtab.integrations import megatron as megatron
    from trimtab.integrations import torchtitan as torchtitan
    from trimtab.integrations import transformer_engine as transformer_engine
    from trimtab.integrations import transformers as transformers
    from trimtab.integrations.transformers.routers.observe import observing as observing
    from trimtab.integrations.transformers.routers.observe import record as record
    from trimtab.integrations.transformers.routers.observe import replay as replay
    from trimtab.integrations.transformers.routers.observe import rollout_decisions as rollout_decisions
    from trimtab.integrations.transformers.summary import summary as summary
    from trimtab.moe import MoE as MoE
    from trimtab.moe import MoEConfig as MoEConfig
    from trimtab.moe import MoEOutput as MoEOutput
    from trimtab.parallel.check_replicated import check_replicated as check_replicated
    from trimtab.parallel.ddp import ddp as ddp
    from trimtab.parallel.ddp import reduce_main_grads as reduce_main_grads
    from trimtab.parallel.expert_parallel import ExpertParallel as ExpertParallel
    from trimtab.parallel.expert_parallel import parallelize as parallelize
    from trimtab.parallel.fsdp import fully_shard_moe as fully_shard_moe
    from trimtab.parallel.grad_norm import clip_grad_norm_ as clip_grad_norm_
    from trimtab.parallel.moe import join_data_parallel as join_data_parallel
    from trimtab.plan.loop import MemoryPlan as MemoryPlan
    from trimtab.plan.loop import plan_memory as plan_memory
    from trimtab.routing.balance import max_vio as max_vio
    from trimtab.routing.balance import set_totals as set_totals
    from trimtab.routing.balance import update_bias as update_bias
    from trimtab.routing.config import RouterConfig as RouterConfig
    from trimtab.routing.losses import LossGroups as LossGroups
    from trimtab.routing.recompute import replay_in_recompute as replay_in_recompute
    from trimtab.routing.replay import Decisions as Decisions
    from trimtab.routing.router import Router as Router
    from trimtab.routing.sequences import sequence_ids as sequence_ids

__version__ = "0.2.0"

if not TYPE_CHECKING:  # or a type checker would let any name pass
    __getattr__, __dir__, __all__ = lazy_names(__name__)
