"""Picks rows of a data set with which `rljob validate` tries the environment of a job."""

from collections.abc import Sequence

from rl_core.api.data import DataSpec
from rl_core.api.env import PROGRAMS
from rl_core.data.dataset import env_info
from rl_core.data.source import Row
from rl_core.messages.envs import EnvRow

COMPLETION = "0"
"""What the model is supposed to have answered; hardly ever right, so that an environment of several turns goes on."""
MOST = 8


def example_rows(rows: Sequence[Row], data: DataSpec, *, field: str, task_name: str) -> dict[str, EnvRow]:
    """Return the first two rows and the first of each further set of filled columns, at most MOST, by place (`data.train row 7`).

    Each is a sample after its first completion. Rows without a usable prompt are left out. Empty for an environment
    that calls the model itself, because there is none at validation.
    """
    if task_name in PROGRAMS:
        return {}
    found: dict[str, EnvRow] = {}
    seen: set[frozenset[str]] = set()
    for number, row in enumerate(rows, start=1):
        columns = frozenset(name for name, value in row.items() if value is not None)
        if (columns in seen and number > 2) or len(found) == MOST:
            continue
        if messages := _messages(row.get(data.prompt_key)):
            seen.add(columns)
            log = [*messages, {"role": "assistant", "content": COMPLETION}]
            found[f"{field} row {number}"] = EnvRow(
                key=f"example-{number}", messages=log, metadata=env_info(row, data), task_name=task_name
            )
    return found


def _messages(prompt: object) -> list[dict[str, str]]:
    """Return a prompt as messages of text; none where it is neither a text nor a list of messages."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        return []
    return [{"role": str(message.get("role")), "content": str(message.get("content"))} for message in prompt]
