"""Picks rows of a data set with which `rljob validate` tries the environment of a job."""

from collections.abc import Mapping

from rl_core.api.data import DataSpec
from rl_core.api.env import PROGRAMS
from rl_core.api.errors import DataError
from rl_core.data.dataset import check_row, env_info
from rl_core.data.source import Row
from rl_core.messages.envs import EnvRow

COMPLETION = "0"
"""What the model is supposed to have answered; hardly ever right, so that an environment of several turns goes on."""
MOST = 8


def example_rows(rows: Mapping[int, Row], data: DataSpec, *, field: str, task_name: str) -> dict[str, EnvRow]:
    """Return the first two rows and the first of each further set of filled columns, at most MOST, by place (`data.train row 7`).

    `rows` are by their index in the data set. Each example is a sample after its first completion. Rows that a run leaves out are skipped.
    Empty for an environment that calls the model itself, because there is none at validation.
    """
    if task_name in PROGRAMS:
        return {}
    examples: dict[str, EnvRow] = {}
    column_sets: set[frozenset[str]] = set()
    for number, row in ((index + 1, row) for index, row in rows.items()):
        columns = frozenset(name for name, value in row.items() if value is not None)
        if (columns in column_sets and len(examples) > 1) or len(examples) == MOST:
            continue
        if (messages := _messages(row.get(data.prompt_key))) and _usable(row, data, field=field, task_name=task_name):
            column_sets.add(columns)
            log = [*messages, {"role": "assistant", "content": COMPLETION}]
            examples[f"{field} row {number}"] = EnvRow(
                key=f"example-{number}", messages=log, metadata=env_info(row, data), task_name=task_name
            )
    return examples


def _usable(row: Row, data: DataSpec, *, field: str, task_name: str) -> bool:
    try:
        check_row(row, data, field=field, where=field, task_name=task_name)
    except DataError:
        return False
    return True


def _messages(prompt: object) -> list[dict[str, str]]:
    """Return a prompt as messages of text; none where it is neither a text nor a list of messages."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        return []
    return [{"role": str(message.get("role")), "content": str(message.get("content"))} for message in prompt]
