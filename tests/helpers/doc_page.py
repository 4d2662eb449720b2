"""The blocks of one page, one after the other, in the folder that this is started in; the standard library is enough.

python doc_page.py BLOCKS.json: a list of {"kind": "python" | "sh" | "file", "page", "line", "text", "name"}.
Under torchrun each rank runs the Python, and the first one does the rest.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LAUNCHER = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|GROUP_WORLD_SIZE|MASTER_.*|TORCHELASTIC_.*|ROLE_NAME")
"""What torchrun says to a rank, and no shell has."""


def main(blocks: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    first = os.environ.get("RANK", "0") == "0"
    shell = {name: value for name, value in os.environ.items() if not LAUNCHER.fullmatch(name)}
    for block in json.loads(blocks.read_text(encoding="utf-8")):
        begun, place = time.monotonic(), f"{block['page']}:{block['line']}"
        if block["kind"] == "python":
            code = "\n" * (block["line"] - 1) + block["text"]  # a traceback has the page's lines
            exec(compile(code, block["page"], "exec"), names)
        elif first and block["kind"] == "file":
            Path(block["name"]).write_text(block["text"], encoding="utf-8")
        elif first:
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", block["text"]], env=shell, check=False)
            if done.returncode:
                sys.exit(f"{place}: exit code {done.returncode}")
        if first:
            print(f"{place}: {time.monotonic() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
