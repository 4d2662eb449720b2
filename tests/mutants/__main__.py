"""Known bugs put in, one at a time: `python -m mutants [NAME ...]`, with tests/ on the path."""

from __future__ import annotations

import argparse
import sys

from mutants import MUTANTS
from mutants.score import MutantScore, score_mutants
from trimtab.cli import Progress
from trimtab.cli.main import exit_code


def main() -> int:
    """Parse, run; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all if not given")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all data (default 0)")
    options = parser.parse_args()
    progress = Progress(len(options.names or MUTANTS), unit="mutant")

    def report(score: MutantScore) -> None:
        mark = "killed" if score.killed else "ALIVE "
        progress.say(f"{mark} {score.name:28} {score.by}  {score.how} ({score.seconds:.1f} s)")
        progress.step()

    scores = score_mutants(report, names=options.names or None, seed=options.seed)
    progress.close()
    killed = sum(score.killed for score in scores)
    print(f"{killed} of {len(scores)} mutants killed")
    return int(killed < len(scores))


if __name__ == "__main__":
    sys.exit(exit_code(main))
