"""Judge other libraries' MoE layers and write docs/peers.md: `python -m peers [NAME ...]`, with tests/ on the path."""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from peers.failures import FAILURES, failure_named
from peers.judge import Result, cases_of, judge, version_of
from peers.page import write_page
from peers.registry import ROOT, Peer, fetch_all, peer_named, peers
from peers.reproduce import reproduce_all
from trimtab.cli import Progress
from trimtab.cli.main import exit_code
from trimtab.errors import ConfigError, TrimtabError
from trimtab.verify.implementation import get_implementation

LIMIT = 900
"""Seconds for a peer, after which it is given up."""


def main() -> int:
    """Parse, run; the exit code: 1 where a failure has no reproduction, or a reproduction no failure."""
    parser = argparse.ArgumentParser(prog="python -m peers", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="peers, all if not given; only all write the page")
    parser.add_argument("--fetch", action="store_true", help="fill .peers with what is judged, and end")
    parser.add_argument("--reproduce", metavar="ID", help="one failure, outside of the ledger, and end")
    parser.add_argument("--results", metavar="DIR", default="runs/peers", help="for results (default runs/peers)")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fetch:
        return fetch_all()
    if options.reproduce:
        return reproduce_all([failure_named(options.reproduce)])[1]
    folder = Path(options.results)
    folder.mkdir(parents=True, exist_ok=True)
    if options.one:
        (folder / f"{options.one}.result").write_bytes(pickle.dumps(_judge_here(peer_named(options.one))))
        return 0
    chosen = [peer_named(name) for name in options.names] or list(peers())
    progress, results = Progress(len(chosen), unit="peer"), {}
    for peer in chosen:
        results[peer.name] = result = _in_a_process(peer, folder)
        counts = Counter(case.status for case in result.cases)
        progress.say(f"{peer.name}: {result.absent or dict(counts)} ({result.seconds:.0f} s)")
        progress.step()
    progress.close()
    if options.names:
        return 0
    seen, missed = reproduce_all(FAILURES)
    return write_page(results, seen) or missed


def _judge_here(peer: Peer) -> Result:
    start = time.perf_counter()
    try:
        get_implementation(peer.impl)
    except TrimtabError as error:
        return Result(peer=peer.name, absent=str(error).splitlines()[-1])
    cases = judge(peer, cases_of(peer))
    return Result(peer=peer.name, version=version_of(peer, ROOT), cases=cases, seconds=time.perf_counter() - start)


def _in_a_process(peer: Peer, folder: Path) -> Result:
    """Judge it with its own path. Raises ConfigError where that came to no result."""
    path = folder / f"{peer.name}.result"
    path.unlink(missing_ok=True)
    places = [*(str(ROOT / name) for name in peer.folders), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places)), "OMP_NUM_THREADS": "1"}
    work = [sys.executable, "-m", "peers", "--one", peer.name, "--results", str(folder)]
    with path.with_suffix(".log").open("w") as log, suppress(subprocess.TimeoutExpired):
        subprocess.run(work, env=env, stdout=log, stderr=log, timeout=LIMIT, check=False)
    if not path.exists():
        raise ConfigError(f"{peer.name} was not judged within {LIMIT} s: see {path.with_suffix('.log')}")
    result: Result = pickle.loads(path.read_bytes())
    return result


if __name__ == "__main__":
    sys.exit(exit_code(main))
