"""`python -m trimtab …` is the command `trimtab …`, for launchers that start modules."""

import sys

from trimtab.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
