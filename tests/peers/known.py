"""Failures of peers but Megatron-Core."""

from __future__ import annotations

from peers.failure import Failure
from peers.reproduce import Reproduction

LIT = r"RuntimeError: element 0 of tensors does not require grad"
VIEW = r"RuntimeError: cannot reshape tensor of 0 elements"
STAYS = r"ends|waits|hangs|RuntimeError|dies"
"""What the other ranks of a group do, which depends on how far they came."""

KNOWN = (
    Failure(
        id="transformers-eager-no-tokens", peers="transformers-eager|peft-eager", message=LIT,
        title="transformers, eager experts: no gradient without tokens",
        says="A rank without tokens gets zeros that no parameter is part of. In a model where something else needs a "
        "gradient the experts' stay None there, which matters where ranks reduce them; where nothing else does, "
        "backward raises. `grouped_mm` is right, and over expert parallelism so is eager: all_to_all sends a row.",
        reproduction=Reproduction(
            prelude="transformers", expected=(LIT,),
            lines='x = torch.zeros(1, 0, 16, requires_grad=True)\nblock("eager")(x).sum().backward()',
        ),
    ),
    Failure(
        id="peft-expert-parallel", peers="peft", message="mixed torch.Tensor and DTensor",
        title="peft: adapters of parameters over transformers' expert parallelism",
        says="peft adds scale * B A to the whole parameter, which is a DTensor there: PyTorch stops the first forward "
        "on every rank, with a clear message. peft supports its tensor parallelism; for parameters of experts "
        "under its expert parallelism we found no promise.",
        reproduction=Reproduction(
            prelude="peft", folders=("peft",), expected=("mixed torch.Tensor and DTensor",) * 2,
            lines='mlp = adapted(laid_out(model("grouped_mm")))\nmlp(torch.randn(1, 4, 16))',
        ),
    ),
    Failure(
        id="llep-no-tokens", peers="llep", message=VIEW, title="LLEP: a rank without tokens",
        says="`.view(batch, -1, hidden)` of the result is ambiguous for no tokens. The other ranks wait in backward.",
        reproduction=Reproduction(
            prelude="llep", folders=("llep",), expected=(VIEW, STAYS),
            lines="group = dist.group.WORLD\nexperts(4 * rank, group)",
        ),
    ),
    Failure(
        id="llep-second-group", peers="llep", message="is not part of group|waits|no answer",
        title="LLEP: an expert-parallel group that does not begin at rank 0",
        says="Weights are sent to ranks of the group, where `P2POp` takes ranks of the world: with more than one group "
        "the second fails as soon as a weight moves. With one group of all ranks, as its test has, all is right.",
        reproduction=Reproduction(
            prelude="llep", folders=("llep",), expected=("ends", "ends", "not part of group", "not part of group"),
            lines="groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]\nexperts(4, groups[rank // 2], expert=0)",
        ),
    ),
)  # fmt: skip
