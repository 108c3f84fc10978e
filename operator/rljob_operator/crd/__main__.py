"""Write crds/rljob.yaml, or with --check fail when it differs from the schema."""

import sys
from pathlib import Path

from rljob_operator.crd.document import render

PATH = Path("crds/rljob.yaml")


def main(arguments: list[str]) -> int:
    """Write or check the file below the current folder; return the exit code."""
    text = render()
    if "--check" in arguments:
        if PATH.is_file() and PATH.read_text() == text:
            return 0
        sys.stderr.write(f"{PATH} differs from the schema; run make docs\n")
        return 1
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
