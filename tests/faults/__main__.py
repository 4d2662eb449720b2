"""Ranks that are killed, frozen, delayed or led astray: `python -m faults`, with tests/ on the path."""

from __future__ import annotations

import argparse
import sys

from faults.cases import FaultResult, fault_cases
from faults.run import run_faults
from trimtab.cli import Progress
from trimtab.cli.main import exit_code


def main() -> int:
    """Break ranks on purpose; the exit code."""
    argparse.ArgumentParser(prog="python -m faults", description=__doc__).parse_args()
    cases = fault_cases()
    progress = Progress(len(cases), unit="fault")

    def report(result: FaultResult) -> None:
        progress.say(str(result))
        progress.step()

    results = run_faults(cases, report)
    progress.close()
    bad = [result for result in results if not result.good]
    slowest = max((r.seconds for r in results if r.fault.kind == "kill"), default=0.0)
    print(f"{len(results)} faults, {len(bad)} not as they should be; slowest answer to a killed rank {slowest:.2f} s")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(exit_code(main))
