"""Writes the arguments of the installed SGLang into `rl_core/plan/sglang_arguments.json`: `python -m tests.lint.sglang_arguments`.

With `--check`, run by `make lint`, it exits 1 if the file differs. The arguments are read from SGLang's source, as importing SGLang takes 20
seconds of processor time.
"""

import ast
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from rl_core.plan.engine_arguments import FILE

KINDS = {"bool": "boolean", "int": "integer", "float": "number", "str": "string", "None": "null"}
CONTAINERS = {"List": "array", "set": "array", "list": "array", "Dict": "object", "dict": "object"}
RECORDS = {"CudaGraphConfig": "object", "LoRARef": "object"}
ELSEWHERE = {"sampling_backend": "BUILT_IN_SAMPLING_BACKENDS"}
"""Arguments whose choices do not stand beside their types, and the shared list that has them."""


def kinds(node: ast.expr) -> Iterator[object]:
    """Yield what a value of the annotated type may be in JSON: names of JSON types, and the values of a Literal as {"is": value}."""
    if isinstance(node, ast.Subscript):
        name = ast.unparse(node.value)
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name == "Literal":
            for value in inner:
                yield "null" if value.value is None else {"is": value.value}
        elif name in CONTAINERS:
            yield CONTAINERS[name]
        elif name in ("Optional", "Union"):
            for part in inner:
                yield from kinds(part)
            if name == "Optional":
                yield "null"
        else:
            raise ValueError(f"the type {ast.unparse(node)} of an argument of SGLang is not known; add it here")
        return
    name = ast.unparse(node)
    if name == "Callable":  # cannot be given in JSON
        yield "function"
    else:
        yield (KINDS | CONTAINERS | RECORDS)[name]


def lists(package: Path) -> dict[str, list[object]]:
    """Return the lists of choices that several arguments share, by their names in the source."""
    found: dict[str, list[object]] = {}
    for line in ast.parse((package / "srt" / "arg_groups" / "choices.py").read_text()).body:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            value = line.value
            if isinstance(value, ast.Call) and value.args:  # frozenset({...})
                (value,) = value.args
            if isinstance(value, ast.List | ast.Set):
                found[line.targets[0].id] = sorted(ast.literal_eval(value))
    return found


def choices(node: ast.expr, shared: dict[str, list[object]]) -> list[object]:
    """Return the values of an expression for choices: a literal, a shared list or the sum of two."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*choices(node.left, shared), *choices(node.right, shared)]
    return shared[node.id] if isinstance(node, ast.Name) else list(ast.literal_eval(node))


def kinds_of_argument(name: str, annotation: ast.expr, shared: dict[str, list[object]]) -> list[object]:
    """Return what an argument may be. Its choices take the place of the type that they have; a Literal and a list have none here."""
    meta: list[ast.expr] = []
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "A":
        annotation, *meta = annotation.slice.elts
    plain = list(kinds(annotation))
    given = [
        word.value for call in meta if isinstance(call, ast.Call) for word in call.keywords if word.arg == "choices"
    ]
    if name in ELSEWHERE:
        given.append(ast.Name(ELSEWHERE[name]))
    if given and set(map(str, plain)) <= {"string", "integer", "null"}:
        plain = [kind for kind in plain if kind == "null"] + [{"is": value} for value in choices(given[0], shared)]
    return sorted({str(one): one for one in plain}.values(), key=str)


def arguments(package: Path) -> dict[str, list[object]]:
    """Return name -> kinds of every public argument of ServerArgs, in the order of the source."""
    found: dict[str, list[object]] = {}
    shared = lists(package)
    for file in sorted((package / "srt" / "arg_groups" / "fields").glob("*.py")):
        for cls in ast.parse(file.read_text()).body:
            for field in cls.body if isinstance(cls, ast.ClassDef) else []:
                if isinstance(field, ast.AnnAssign) and not field.target.id.startswith("_"):
                    found[field.target.id] = kinds_of_argument(field.target.id, field.annotation, shared)
    return found


def text() -> str:
    """Return the content of the file for the installed SGLang."""
    package = Path(importlib.util.find_spec("sglang").origin).parent
    rows = [f"{json.dumps(name)}: {json.dumps(of)}" for name, of in arguments(package).items()]
    version = json.dumps(importlib.metadata.version("sglang"))
    return f'{{"version": {version}, "arguments": {{\n' + ",\n".join(rows) + "\n}}\n"


def main() -> int:
    """Write the file, or compare it; return the exit code."""
    if "--check" not in sys.argv:
        FILE.write_text(text())
    elif not FILE.exists() or FILE.read_text() != text():
        print(f"{FILE.name} is not that of the installed SGLang: run python -m tests.lint.sglang_arguments")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
