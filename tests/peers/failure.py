"""A known failure: which cases it explains, what it is, and the lines that show it elsewhere."""

from __future__ import annotations

import re
from dataclasses import dataclass

from peers.judge import Judged
from peers.registry import Peer
from peers.reproduce import Reproduction


@dataclass(frozen=True, kw_only=True)
class Failure:
    """peers: names that begin so. message: a pattern for what a case said. says: what happens, to whom, and what works.

    gloo: it is of the CPU's backend or of what stands in here, and not to be expected on GPUs.
    """

    id: str
    peers: str
    message: str
    title: str
    says: str
    reproduction: Reproduction
    gloo: bool = False

    def explains(self, peer: Peer, case: Judged) -> bool:
        return bool(re.match(self.peers, peer.name)) and bool(re.search(self.message, case.said))
