"""A later version of rljob: this tree with a field more in `algorithm` and with another default. Used by tests of upgrades."""

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
GROUP_SIZE = "    group_size: int = Field(8, ge=1, le=1024)\n"
CHANGED = '''    later_field: int = 3
    """A field that the other version lacks."""
    group_size: int = Field(16, ge=1, le=1024)
'''


def build(folder: Path) -> Path:
    """Write the later version's packages below `folder` and return it, for PYTHONPATH and as working directory."""
    for package in ("rl_core", "operator/rljob_operator"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    schema = folder / "rl_core/api/algorithm.py"
    text = schema.read_text()
    assert GROUP_SIZE in text, f"{schema} must define groupSize as it is replaced here"
    schema.write_text(text.replace(GROUP_SIZE, CHANGED))
    return folder
