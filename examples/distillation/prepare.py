"""Make student and teacher: the quickstart's model, which forgets to carry, and the same model before it was spoiled.

    python prepare.py [--output DIR] [--quick]

Takes twice the time of ../arithmetic/prepare.py, about two minutes.
"""

import argparse
import os
import runpy
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    """Make the folders `student` and `teacher`, each with model and data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE, help="folder for student/ and teacher/")
    parser.add_argument("--quick", action="store_true", help="models of 0.25M parameters, in a third of the time")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    prepare = runpy.run_path(str(HERE.parent / "arithmetic" / "prepare.py"))["prepare"]
    for name, unspoiled in (("student", False), ("teacher", True)):
        made = prepare(options.output / name, seed=0, quick=options.quick, unspoiled=unspoiled)
        print(f"{name}: validation accuracy {made['accuracy']:.3f}")


if __name__ == "__main__":
    main()
