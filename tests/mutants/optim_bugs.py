"""Bugs of optimizers that take experts' stacks for other matrices than they are, and of their state."""

from __future__ import annotations

from helpers.optim_ranks import check_dealt
from helpers.storages import check_resumed, check_storage
from mutants.patching import Edit, RanksTest, bug

STEP, SCALE = "optim.muon:Muon._muon", "scale(outs, ins)"


def _storage(name: str, scale: str = "match_rms_adamw", nesterov: bool = True) -> RanksTest:
    return RanksTest(run=check_storage, ranks=1, args=(name, scale, nesterov))


# fmt: off
MUTANTS = (
    bug("gate_and_up_as_one", "gate and up are orthogonalized as one matrix (Megatron#7077, torchtitan#4532)",
        Edit("optim.matrices:_stack", "axis = -1", "parts, turns = 1, False\n    axis = -1"),
        test=_storage("qwen3_moe")),
    bug("turns_as_halves", "gate and up that take turns are read as halves",
        Edit("optim.matrices:_stack", "axis = -1", "turns = False\n    axis = -1"), test=_storage("gpt_oss")),
    bug("halves_as_turns", "gate above up is read as if they took turns",
        Edit("optim.matrices:_stack", "axis = -1", "turns = parts > 1\n    axis = -1"), test=_storage("aria")),
    bug("scale_of_stored_shape", "the scale is of in x out, as the weight is stored (muon-optimizer)",
        Edit(STEP, SCALE, "scale(*((ins, outs) if layout.axis == -1 else (outs, ins)))"),
        test=_storage("llama4", "original")),
    bug("scale_of_fused_shape", "the scale is of gate and up together",
        Edit(STEP, SCALE, "scale(outs * len(layout.sizes), ins)"), test=_storage("qwen3_moe")),
    bug("stack_as_one", "a stack of experts in two dims is one matrix, which torch's split by ndim == 2 makes of DBRX",
        Edit("optim.matrices:_stack", "axis = -1", "stacks = 1\n    axis = -1"), test=_storage("dbrx")),
    bug("norm_of_the_batch", "matrices of a batch are divided by the norm of all of them",
        Edit("optim.newton_schulz:_normalized", "dim=(-2, -1), keepdim=True)", "keepdim=True)"),
        test=_storage("ours")),
    bug("momentum_normalized", "without Nesterov the update is the momentum itself, and overwrites it (pytorch#190597)",
        Edit("optim.muon:Muon._update", "buffer.clone()", "buffer"), test=_storage("ours", nesterov=False)),
    bug("momentum_not_resumed", "the momentum is left out of what is loaded",
        Edit("optim.muon:Muon.load_state_dict", "isinstance(v, Tensor)}",
             "isinstance(v, Tensor)} | {'momentum_buffer': torch.zeros_like(param)}"),
        test=RanksTest(run=check_resumed, ranks=1)),
    bug("state_in_the_weights_dtype", "state is cast to the weights' dtype on resume, as torch's optimizers do",
        Edit("optim.muon:Muon.load_state_dict", "self.state[param] |=", "_ ="),
        test=RanksTest(run=check_resumed, ranks=1)),
    bug("shares_apart_as_one", "what a rank holds in pieces that lie apart is put together as if it were one",
        Edit("optim.exchange:whole_matrices", "(cut.pieces, -1))\n        t = _swap(runs, 0, dealt, dim + 1, cut.runs",
             "(1, -1))\n        t = _swap(runs, 0, dealt, dim + 1, cut.sizes"),
        test=RanksTest(run=check_dealt, ranks=4, args=("tp 2 x fsdp 2",))),
    bug("shares_in_the_wrong_order", "shares of a matrix are put together in another order than the mesh has them",
        Edit("optim.exchange:_swap", "strict=True)]", "strict=True)][::-1]"),
        test=RanksTest(run=check_dealt, ranks=2, args=("fsdp, dim 0",))),
    bug("share_as_a_matrix", "a rank orthogonalizes what it has of a matrix that is cut, as if it were whole",
        Edit("optim.exchange:cuts_of", "    return found", "    return []"),
        look="2r-etp2-local-muon/*"),
    bug("dealt_to_others", "matrices go to other ranks than their shares come home from",
        Edit("optim.exchange:whole_matrices", "0, dealt, cut.group", "0, dealt[::-1], cut.group"),
        test=RanksTest(run=check_dealt, ranks=2, args=("fsdp, dim 0",))),
)
