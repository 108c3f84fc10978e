"""Write crds/rljob.yaml and the chart's copy, or with --check fail when one differs from the schema."""

import sys
from pathlib import Path

from rljob_operator.crd.document import render

PATHS = (Path("crds/rljob.yaml"), Path("helm/rljob/files/rljob.yaml"))
"""The definition for `kubectl apply`, and the chart's copy: a chart cannot read files outside its folder."""


def main(arguments: list[str]) -> int:
    """Write or check the files below the current folder; return the exit code."""
    text = render()
    stale = [path for path in PATHS if not path.is_file() or path.read_text() != text]
    if "--check" in arguments:
        for path in stale:
            sys.stderr.write(f"{path} differs from the schema; run make docs\n")
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
