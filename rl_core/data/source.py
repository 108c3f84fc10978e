"""Reads the rows of a data set: JSONL, parquet, `hf://` (fetched first) or `reasoning-gym://` (generated).

Errors name the file and, for JSONL, the line.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from rl_core.api.errors import ConfigError, DataError
from rl_core.data.hub import HUB_SCHEME, fetch

logger = logging.getLogger(__name__)

GENERATED_SCHEME = "reasoning-gym://"
SOURCE_COLUMN = "data_source"
"""Column with the name of the data set of a row, as in the data of verl."""
ROW = " row "
"""Stands between the field and the number of a row in the errors of rows."""
SHOWN_PROBLEMS = 10
"""Number of bad rows that an error lists; further ones are counted."""
Row = dict[str, Any]
T = TypeVar("T")


class UnusableRows(DataError):
    """More rows cannot be used than `data.maxBadRows` allows."""

    def __init__(self, message: str, good: Mapping[int, Any]) -> None:
        super().__init__(message)
        self.good = good
        """The usable rows by their index in the file; indices of unusable rows are missing."""


def collect(outcomes: Iterable[T | DataError], *, rows: str, max_bad: int = 0) -> dict[int, T]:
    """Return the outcomes that are no errors, each by its index.

    Up to `max_bad` errors are logged; beyond that one UnusableRows lists the first SHOWN_PROBLEMS of them, where equal ones share a line, and
    `rows` names the others.
    """
    good: dict[int, T] = {}
    problems: list[str] = []
    for index, outcome in enumerate(outcomes):
        if isinstance(outcome, DataError):
            problems.append(str(outcome))
        else:
            good[index] = outcome
    if problems and len(problems) <= max_bad:
        logger.warning(
            "%s: %d left out, of data.maxBadRows %d; the first: %s", rows, len(problems), max_bad, problems[0]
        )
    elif problems:
        problems = _grouped(problems)
        more = len(problems) - SHOWN_PROBLEMS
        raise UnusableRows("\n".join(problems[:SHOWN_PROBLEMS] + [f"{rows}: {more} more"] * (more > 0)), good)
    return good


def _grouped(problems: list[str]) -> list[str]:
    """Return the problems with one line for all that differ in their row only: `data.train row 3: rule (and 20 more rows: 4, 5, 6, ...)`."""
    rows: dict[str, list[str]] = {}
    for problem in problems:
        where, _, text = problem.partition(": ")
        rows.setdefault(text if ROW in where else problem, []).append(where)
    lines = []
    for text, places in rows.items():
        row_numbers = [place.rpartition(ROW)[2] for place in places[1:]]
        shown = ", ".join(row_numbers[:3]) + ", ..." * (len(row_numbers) > 3)
        lines.append(f"{places[0]}: {text} (and {len(row_numbers)} more rows: {shown})" if row_numbers else text)
        if not row_numbers and ROW in places[0]:
            lines[-1] = f"{places[0]}: {text}"
    return lines


def source_name(reference: str) -> str:
    """Return the name of a data set in messages: that of its file, or the whole reference where it has a scheme."""
    return reference if "://" in reference else Path(reference).name


def read_rows(reference: str, *, field: str, name: str = "", max_bad_rows: int = 0) -> list[Row]:
    """Return the rows of a data set in their order; the arguments and errors are those of `numbered_rows`."""
    return list(numbered_rows(reference, field=field, name=name, max_bad_rows=max_bad_rows).values())


def numbered_rows(reference: str, *, field: str, name: str = "", max_bad_rows: int = 0) -> dict[int, Row]:
    """Return the rows of the data set `reference` by their index in it; `field` (such as `data.train`) names it in errors.

    The indices of lines that were left out are missing. Rows without the column SOURCE_COLUMN get `name` as that column if it is not empty.

    Raises ConfigError for a file that is missing, empty or of an unknown kind, and UnusableRows with a line per malformed line when there
    are more than `max_bad_rows`.
    """
    rows = _read(reference, field=field, max_bad_rows=max_bad_rows)
    return {index: {SOURCE_COLUMN: name} | row for index, row in rows.items()} if name else rows


def _read(reference: str, *, field: str, max_bad_rows: int) -> dict[int, Row]:
    if reference.startswith(GENERATED_SCHEME):
        return dict(enumerate(_generate(reference, field=field)))
    path = fetch(reference) if reference.startswith(HUB_SCHEME) else Path(reference)
    try:
        rows = _read_file(path, reference, field=field, max_bad_rows=max_bad_rows)
    except OSError as error:
        raise ConfigError(
            f"{field} must be readable, got {reference[:80]}: {error.strerror}; check the file"
        ) from error
    if not rows:
        raise ConfigError(f"{field} must hold at least one row, got an empty file: {path}; fill it or choose another")
    return rows


def _read_file(path: Path, reference: str, *, field: str, max_bad_rows: int) -> dict[int, Row]:
    if path.is_dir() and (files := sorted(path.glob("*.parquet"))):
        return dict(enumerate(row for file in files for row in _read_parquet(file, field=field)))
    if path.is_dir():
        raise ConfigError(
            f"{field} must be a file or a folder with .parquet files, got a folder without any: {reference}; name a file in it, or write "
            f"the data set with to_parquet or to_json"
        )
    if not path.is_file():
        raise ConfigError(
            f"{field} must be an existing file, got {reference}; check the path (relative paths start at the job file)"
        )
    if path.suffix == ".parquet":
        return dict(enumerate(_read_parquet(path, field=field)))
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        return collect(_read_jsonl(path), rows=f"{path}: malformed lines", max_bad=max_bad_rows)
    raise ConfigError(f"{field} must end in .jsonl or .parquet, got {path.name}; convert the file")


def _read_jsonl(path: Path) -> Iterator[Row | DataError]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line, object_pairs_hook=_object)
            except (ValueError, RecursionError) as error:
                cause = (
                    f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
                )
                yield DataError(f"{path}:{number}: a line must be one JSON object, got {cause}; correct the line")
                continue
            if isinstance(row, dict):
                yield row
            else:
                kind = type(row).__name__
                yield DataError(f"{path}:{number}: a line must be a JSON object, got {kind}; correct the line")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises ValueError for a repeated key, because all but one of its values would be lost."""
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = next(key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1)
        raise ValueError(f"the key {twice!r} twice")
    return row


def _read_parquet(path: Path, *, field: str) -> list[Row]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise ConfigError(
            f"{field} is a parquet file, which needs pyarrow: pip install 'rljob[actor]', or use .jsonl"
        ) from error
    try:
        rows: list[Row] = read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise DataError(f"{path}: must be a readable parquet file, got {error}; write it again") from error
    return rows


def _generate(reference: str, *, field: str) -> list[Row]:
    from rl_core.data.reasoning_gym import generate_entries

    task, _, query = reference.removeprefix(GENERATED_SCHEME).partition("?")
    options: dict[str, Any] = {}
    for key, text in parse_qsl(query, keep_blank_values=True):
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    size, seed = options.pop("size", 512), options.pop("seed", 0)
    if type(size) is not int or size < 1:
        raise ConfigError(f"{field}: size of {reference} must be a positive integer, got {size!r}; write ?size=512")
    if type(seed) is not int:
        raise ConfigError(f"{field}: seed of {reference} must be an integer, got {seed!r}; write &seed=1")
    entries = generate_entries(task, size, seed, options)
    return [{"prompt": e["question"], "answer": e["answer"], "metadata": e["metadata"]} for e in entries]
