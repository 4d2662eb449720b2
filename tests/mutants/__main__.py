"""Known bugs put in, one at a time: `python -m mutants [NAME ...]`, with tests/ on the path.

NAME: of a mutant, a glob of names, or a file of tests/mutants: `python -m mutants 'adapter_*' dispatch_bugs`.
"""

from __future__ import annotations

import argparse
import sys

from mutants import mutants_named
from mutants.score import MutantScore, score_mutants
from trimtab.cli import Progress
from trimtab.cli.main import exit_code


def main() -> int:
    """Parse, run; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="of a mutant, a glob, or a file of tests/mutants; all if not given"
    )
    parser.add_argument("--cases", type=int, metavar="N", help="give up on a mutant after N, the likely ones first")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all data (default 0)")
    options = parser.parse_args()
    chosen = mutants_named(*options.names)
    progress = Progress(len(chosen), unit="mutant")

    def report(score: MutantScore) -> None:
        mark = "killed" if score.killed else "ALIVE "
        progress.say(f"{mark} {score.name:28} {score.by}  {score.how} ({score.seconds:.1f} s)")
        progress.step()

    scores = score_mutants(report, chosen, seed=options.seed, most=options.cases)
    progress.close()
    killed = sum(score.killed for score in scores)
    print(f"{killed} of {len(scores)} mutants killed")
    return int(killed < len(scores))


if __name__ == "__main__":
    sys.exit(exit_code(main))
