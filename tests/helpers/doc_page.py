"""The blocks of one page, one after the other, in the folder that this is started in. Needs the standard library alone.

python doc_page.py BLOCKS.json: a list of {"kind": "python" | "sh" | "file", "page", "line", "text", "name"}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def main(blocks: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in json.loads(blocks.read_text(encoding="utf-8")):
        begun, text = time.monotonic(), block["text"]
        if block["kind"] == "file":
            Path(block["name"]).write_text(text, encoding="utf-8")
        elif block["kind"] == "sh":
            subprocess.run(["bash", "-euo", "pipefail", "-c", text], check=True)
        else:
            exec(compile("\n" * (block["line"] - 1) + text, block["page"], "exec"), names)  # a traceback has the page's lines
        if os.environ.get("RANK", "0") == "0":
            print(f"{block['page']}:{block['line']}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
