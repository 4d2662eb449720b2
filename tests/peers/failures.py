"""All known failures; by name, and run."""

from __future__ import annotations

from collections.abc import Sequence

from peers.failure import Failure
from peers.fetch import ROOT
from peers.known import KNOWN
from peers.known_megatron import KNOWN_MEGATRON
from peers.reproduce import run_all
from trimtab.errors import ConfigError

FAILURES: Sequence[Failure] = (*KNOWN, *KNOWN_MEGATRON)
VERSIONS = {(): "Megatron-Core 0.16", ("megatron-0.19",): "Megatron-Core 0.19"}
"""What is in front of the path, and what it is."""


def failure_named(name: str) -> Failure:
    """The failure of that id. Raises ConfigError where there is none."""
    found = [failure for failure in FAILURES if failure.id == name]
    if not found:
        raise ConfigError(f"--reproduce {name}: must be one of {', '.join(f.id for f in FAILURES)}")
    return found[0]


def reproduce_all(failures: Sequence[Failure]) -> tuple[dict[str, dict[str, list[str]]], int]:
    """Run them, of each version of a peer; what the ranks ended with, by failure and version, and 1 where one ended
    otherwise than is expected."""
    seen: dict[str, dict[str, list[str]]] = {}
    missed = 0
    batches: dict[tuple[str, tuple[str, ...]], list[tuple[Failure, bool]]] = {}
    for failure in failures:
        one = failure.reproduction
        for folders in VERSIONS if one.prelude == "megatron" else (one.folders,):
            batch = batches.setdefault((one.prelude, folders), [])
            batch += [(failure, False), *([(failure, True)] if one.ours else [])]
    for (prelude, folders), batch in batches.items():
        if absent := [folder for folder in folders if not (ROOT / folder).exists()]:
            print(f"not reproduced, {', '.join(absent)} is not in .peers: {', '.join(f.id for f, _ in batch)}")
            continue
        ends = run_all([(failure.reproduction, ours) for failure, ours in batch], folders=folders)
        for (failure, ours), found in zip(batch, ends, strict=True):
            version = VERSIONS[folders] if prelude == "megatron" else "as it is"
            label = f"{version}, with trimtab" if ours else version
            seen.setdefault(failure.id, {})[label] = found
            for said in failure.reproduction.missed(found, ours=ours, version=version.split()[-1]):
                print(f"{failure.id}, {label}: {said}")
                missed = 1
            print(f"{failure.id}, {label}: {found}", flush=True)
    return seen, missed
