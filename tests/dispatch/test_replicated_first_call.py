"""Ranks that share F, in the very first call: a mistake or a death in one expert group is named on every rank within
seconds, also on those that have not met over any group yet. Nobody ends his process meanwhile."""

from __future__ import annotations

import os
import re
import signal
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.cases import case
from helpers.exchanges import RULE, Changed, D, E, K
from helpers.forks import start
from helpers.ranks import _rank_main
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.options import ReplicationConfig
from trimtab.dispatch.transport import Handshake
from trimtab.dispatch.transports import TRANSPORTS
from trimtab.errors import TrimtabError
from trimtab.parallel.expert_tensor import ExpertTensorGroup

RULES = {"copy_cost": ReplicationConfig(copy_cost=3), "tolerance": ReplicationConfig(copy_cost=2, tolerance=0.25)}
PROMPT, DEADLINE = 8.0, 40.0
"""Seconds: of an error, on a machine that does other things too; and of all cases of a transport. A guard's are 300."""
ALONE, EP, ETP = (3,), (1, 3), (2, 3)
"""Who is wrong, of the ep groups 0 2 and 1 3 and the etp groups 0 1 and 2 3."""


class Killed(Changed):
    """A transport over which this rank does not live to gather."""

    def handshake(self, message_PC: Tensor) -> Handshake:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().handshake(message_PC)


def first_call(transport: str, what: str, guilty: bool, kept: list[Any]) -> tuple[str, float]:
    """Of new transports over new groups: what it raised, and after how many seconds. "again": in a second call."""
    ep, etp = ([dist.new_group(ranks) for ranks in lines] for lines in (([0, 2], [1, 3]), ([0, 1], [2, 3])))
    over_ep: Any = TRANSPORTS[transport](ep[dist.get_rank() % 2])
    over_etp: Any = TRANSPORTS[transport](etp[dist.get_rank() // 2])
    kept += [over_ep, over_etp]  # as a program has them for as long as its error is not at its end
    x, ids, w, _ = case("random", dist.get_rank(), 4, E, K, D, torch.float32)
    rule, fingerprint, good = None if "plain" in what else RULE, "", (x, ids)
    if guilty:
        rule = None if what == "off" else RULES.get(what, rule)
        fingerprint = "other" if "fingerprint" in what else ""
        x, ids = (x[0] if "shape" in what else x), (ids + E if "ids" in what else ids)
        if what in ("sent", "received"):
            over_ep = Changed(over_ep, what)
        over_ep = Killed(over_ep, "") if what == "killed" else over_ep
        over_etp = Killed(over_etp, "") if what == "killed between" else over_etp
    dispatcher = Dispatcher(E, over_ep, replication=rule, etp=over_etp, layer="moe", fingerprint=fingerprint)
    shares, start = ExpertTensorGroup(over_etp, "moe"), time.monotonic()
    try:
        for tokens in [good] * ("again" in what) + [(x, ids)]:
            own = dispatcher.dispatch(*tokens, w)
            rows = shares.dispatch(own.x_MD, own.ids_MK, own.weights_MK, own.num_slots)
            dispatcher.combine(shares.combine(rows.x_MD, rows), own)
    except TrimtabError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "nothing", time.monotonic() - start


def calls_on_rank(pipe: Connection, transport: str, killed: str, cases: list[tuple[str, tuple[int, ...]]]) -> None:
    """One case after the other, and at last one in which a rank dies."""
    rank, kept = dist.get_rank(), list[Any]()
    pipe.send([first_call(transport, what, rank in guilty, kept) for what, guilty in cases])
    pipe.send([first_call(transport, killed, rank in ALONE, kept)])
    pipe.poll(DEADLINE)


DESYNC = r"DesyncError: \[layer moe(.experts)?, rank [01], phase (route|count)\] in the group where rank [01] is "
INPUT = r"InputError: \[layer moe, rank 1, phase (route|count|dispatch)\] in the group where rank 1 is global rank 3: "
SHAPE = INPUT + r"(rank\(s\) 1 were given tensors of the wrong shape|.*tokens must be floating)"
MISTAKES = {
    ("copy_cost", ALONE): DESYNC + r"rank [13]: .*with another dtype.*ReplicationConfig\(tolerance=None, copy_cost=",
    ("copy_cost", EP): DESYNC + r"rank \d: .*with another dtype.*ReplicationConfig\(tolerance=None, copy_cost=",
    ("tolerance", ETP): DESYNC + r"rank \d: .*with another dtype.*ReplicationConfig\(tolerance=",
    ("off", ALONE): DESYNC + r"rank [13]: .*(route forward of layer moe.*count|count.*route) forward of layer moe",
    ("off", EP): r"DesyncError: \[layer moe.*route forward of layer moe,.*count forward of layer moe.experts",
    ("sent", ALONE): DESYNC + r"rank 3: rank\(s\) 1 have other numbers of slots for each expert than",
    ("received", ALONE): DESYNC + r"rank \d: rank\(s\) [01] place replicas of experts by another plan",
    **dict.fromkeys([("shape", ALONE), ("shape, again", ALONE), ("plain, shape", ALONE)], SHAPE),
    **dict.fromkeys([("ids", ALONE), ("plain, ids, again", ALONE)], INPUT + r".*slot\(s\) with an expert id outside"),
    ("plain, fingerprint", ALONE): DESYNC + r"rank [13]: .*with another dtype.*guard on",
    ("none", ()): r"nothing$",
}  # fmt: skip
GONE = r"PeerLost: \[layer moe, rank 1, phase (route|count)\] .*rank 1 \(global rank 3.*is gone: its process has ended"


@pytest.mark.xdist_group("ranks4")
@pytest.mark.parametrize(
    ("transport", "killed"),
    [("alltoall", "killed"), ("allgather", "killed between"), ("shared_memory", "killed"), ("auto", "killed between")],
)
def test_what_is_wrong_in_a_first_call_is_named_on_every_rank_at_once(
    transport: str, killed: str, tmp_path: Path
) -> None:
    ranks, cases = [], list(MISTAKES)
    for rank in range(4):
        (ours, theirs), (failed, fails) = Pipe(), Pipe()
        args = (calls_on_rank, rank, 4, str(tmp_path / "store"), DEADLINE, (transport, killed, cases))
        ranks.append((start(_rank_main, *args, pipes=[theirs, fails]), ours, failed))
        theirs.close()
        fails.close()
    end = time.monotonic() + DEADLINE
    try:
        for rank, (_, said, failed) in enumerate(ranks):
            for expected in (MISTAKES, {(killed, ALONE): GONE})[: 1 if rank in ALONE else 2]:
                assert said.poll(max(0.0, end - time.monotonic())), f"rank {rank} waits in a first call"
                try:
                    found = said.recv()
                except EOFError:
                    pytest.fail(failed.recv()[1])
                for (what, guilty), (text, seconds) in zip(expected, found, strict=True):
                    print(f"{transport} rank {rank} {what} {guilty}: {seconds:.2f} s, {text}")
                    assert re.match(expected[what, guilty], text, re.DOTALL), (what, guilty, rank, text)
                    assert seconds < PROMPT, (what, guilty, rank, text)
    finally:
        for process, *_ in ranks:
            process.kill()
