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


def arguments(package: Path) -> dict[str, list[object]]:
    """Return name -> kinds of every public argument of ServerArgs, in the order of the source."""
    found: dict[str, list[object]] = {}
    for file in sorted((package / "srt" / "arg_groups" / "fields").glob("*.py")):
        for cls in ast.parse(file.read_text()).body:
            for field in cls.body if isinstance(cls, ast.ClassDef) else []:
                if isinstance(field, ast.AnnAssign) and not field.target.id.startswith("_"):
                    kind = field.annotation
                    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "A":
                        kind = kind.slice.elts[0]
                    found[field.target.id] = sorted({str(one): one for one in kinds(kind)}.values(), key=str)
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
