"""Tells the worker what the start of the engine does, by lines of the standard error that all processes of the engine share."""

import sys

STAGE = "engine stage: "
"""Beginning of such a line."""


def tell(stage: str) -> None:
    """Say what the start does, such as "the process imports SGLang"."""
    sys.stderr.write(f"{STAGE}{stage}\n")
    sys.stderr.flush()
