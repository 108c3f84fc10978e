"""The check of `make lint` finds circles of any length, wherever their imports stand."""

import pytest

from tests.lint.circles import circles
from tests.lint.import_graph import graph

FILES = {
    "whole.py": "from rl_core import part\n",
    "part.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rl_core.whole import Whole\n",
    "first.py": "import rl_core.second\n",
    "second.py": "def work():\n    from .third import thing\n",
    "third.py": "from rl_core.first import a, b\n",
    "leaf.py": "import sys\n",
    "user.py": "from rl_core.leaf import x\nfrom rl_core.package import inner\n",
    "package/__init__.py": "from rl_core.package.inner import value\n",
    "package/inner.py": "from . import other\n",
    "package/other.py": "",
}


@pytest.fixture
def files(tmp_path):
    found = {}
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        found[f"rl_core.{module}"] = path
    return found


def test_circles_of_any_length_are_found_once_and_nothing_else_is(files):
    found = circles(graph(files, types=True))
    assert sorted(found) == [
        ["rl_core.first", "rl_core.second", "rl_core.third"],
        ["rl_core.part", "rl_core.whole"],
    ]


def test_an_import_for_types_is_no_import_when_the_program_runs(files):
    assert graph(files, types=False)["rl_core.part"] == frozenset()
    assert circles(graph(files, types=False)) == [["rl_core.first", "rl_core.second", "rl_core.third"]]


def test_names_and_relative_imports_are_resolved_to_files(files):
    found = graph(files, types=False)
    assert found["rl_core.user"] == {"rl_core.leaf", "rl_core.package.inner"}
    assert found["rl_core.package.inner"] == {"rl_core.package.other"}
    assert found["rl_core.package"] == {"rl_core.package.inner"}
