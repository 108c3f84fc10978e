"""Every module is part of some process: reached by imports, or by name, from what people and containers start."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.lint.import_graph import graph, modules, parsed

STARTED = {
    "rl_core.cli.main": "the commands rljob and kubectl rljob",
    "rl_core.launch.pod": "the command of every pod",
    "rljob_operator.__main__": "the operator",
    "rljob_operator.cli.commands": "the entry point rljob.commands",
    "rljob_operator.cli.targets": "the entry point rljob.targets",
    "rl_core.cli.reference": "make docs",
    "rljob_operator.crd.__main__": "make docs",
}
FACES = {
    "rl_core.runner.group_program": "programs of users derive from it",
    "rl_core.groups.reward_model": "jobs name its class in spec.groups",
    "rl_core.groups.judge": "the same",
    "rl_core.groups.teacher": "the same",
    "rl_core.groups.inference": "the same",
    "rl_core.groups.critic": "the same",
    "rl_core.rollouts.sglang.cpu.stand_in.sgl_kernel": "what sglang itself imports as sgl_kernel, in its processes on a CPU",
    "rl_core.rollouts.sglang.cpu.stand_in.triton": "what sglang itself imports as triton, in its processes on a CPU",
    "rl_core.rollouts.sglang.cpu.stand_in.triton.runtime": "a part of it",
}
"""Modules that only code of users imports."""
BY_NAME = re.compile(r"(rl_core(?:\.\w+)+)(?::\w+)?|([a-z_]+(?:\.[a-z_]+)*):\w+")
"""`rl_core.module`, `rl_core.module:name`; or `module:name` below the package of the file."""


def test_every_module_is_reached_from_what_is_started():
    files = modules()
    imports = {name: found | set(_by_name(name, files)) for name, found in graph(files, types=False).items()}
    reached: set[str] = set()
    waiting = [*STARTED, *FACES]
    for name in waiting:
        if name not in reached and name in files:
            reached.add(name)
            parents = (name[:dot] for dot in range(len(name)) if name[dot] == ".")
            waiting += [*parents, *imports[name]]
    assert sorted(set(files) - reached) == [], "no process imports these: use them or delete them"


def test_what_is_listed_as_used_by_users_is_used_by_nothing_else():
    files = modules()
    found = graph(files, types=False)
    assert {face for face in FACES if any(face in imported for imported in found.values())} == set()


def _by_name(module: str, files: dict[str, Path]) -> Iterator[str]:
    """Yield the modules that a file names in texts (`python -m`, classes by name) or through a package that imports its parts late."""
    tree = parsed(files[module])
    package = module if files[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (match := BY_NAME.fullmatch(node.value)):
            name = match[1] or f"{package}.{match[2]}"
            yield from (found for found in (name, f"{name}.__main__") if found in files)
        elif isinstance(node, ast.ImportFrom) and node.module in files:
            homes = _late_homes(files[node.module])
            yield from (f"{node.module}.{homes[alias.name]}" for alias in node.names if alias.name in homes)


def _late_homes(package: Path) -> dict[str, str]:
    """Return name -> module of a package whose `__getattr__` imports at first use, as told by its table."""
    tree = parsed(package)
    if not any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body):
        return {}
    homes: dict[str, str] = {}
    for table in (node for node in ast.walk(tree) if isinstance(node, ast.Dict)):
        for key, value in zip(table.keys, table.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                homes |= {ast.literal_eval(name): key.value for name in value.elts}
            elif isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                homes[key.value] = value.value
    return homes
