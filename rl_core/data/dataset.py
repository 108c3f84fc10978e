"""Reads and tokenizes the prompts of a data set, which the ledger then leases to rollouts."""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_core.api.data import DataSpec
from rl_core.api.env import PROGRAMS
from rl_core.api.errors import ConfigError, DataError, shown
from rl_core.api.records import DatumSpec
from rl_core.data.source import ROW, Row, UnusableRows, collect, numbered_rows, source_name
from rl_core.data.tokenizer import Tokenizer, head_of
from rl_core.transports import frames

logger = logging.getLogger(__name__)

CHAT_ROLES = frozenset({"system", "user", "assistant", "tool"})
GYM_COLUMN = "responses_create_params"
"""Column of rows of NeMo-Gym with the arguments of their model calls."""
ANSWERED_TASKS = frozenset({"math"})
"""Environments that need an answer in every row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptDataset:
    """The samples of data sets that are short enough, in file order, one data set behind the other.

    `samples[i]["idx"]` is the row's index in the file; in further data sets, also counting the rows of those before.
    """

    samples: list[DatumSpec]
    dropped_overlong: int
    """Number of rows that were dropped because their prompt leaves no room for a completion."""
    sizes: tuple[int, ...]
    """Number of samples of each data set."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.samples)

    def __getitem__(self, index: int) -> DatumSpec:
        """Return one sample."""
        return self.samples[index]


def load_sets(
    data: DataSpec, tokenizer: Tokenizer, *, validation: bool, task_name: str, max_seq_len: int
) -> PromptDataset:
    """Return the training prompts of all data sets, or those of `validation`; without any it is empty. Raises as `load_prompts`."""
    column = "validation" if validation else "train"
    samples: list[DatumSpec] = []
    sizes, dropped, rows = [], 0, 0
    for name, field, part in data.parts():
        reference, field = getattr(part, column), f"{field}.{column}"
        if reference is None:
            continue
        loaded = load_prompts(
            reference, part, tokenizer, field=field, name=name, task_name=task_name, max_seq_len=max_seq_len
        )
        if loaded.dropped_overlong:
            logger.warning(
                "%s: %s prompts of %s tokens or more dropped (data.onOverlong)",
                field,
                loaded.dropped_overlong,
                max_seq_len,
            )
        for sample in loaded.samples:
            sample["idx"] += rows
        rows = loaded.samples[-1]["idx"] + 1
        samples += loaded.samples
        sizes.append(len(loaded))
        dropped += loaded.dropped_overlong
    return PromptDataset(samples=samples, dropped_overlong=dropped, sizes=tuple(sizes))


def load_prompts(
    reference: str,
    data: DataSpec,
    tokenizer: Tokenizer,
    *,
    field: str,
    name: str = "",
    task_name: str,
    max_seq_len: int,
) -> PromptDataset:
    """Read and tokenize the prompts of the data set `reference`; `field` (such as `data.train`) names it in errors.

    `name` is that of the data set where a job has several.

    A prompt of `max_seq_len` tokens or more leaves no room for a completion: it is dropped and counted, or refused (data.onOverlong). Raises
    ConfigError if no prompt is left or no row has a column that the job names, and DataError with a line per problem when
    more than data.maxBadRows lines are malformed, or more than that many rows cannot be used.
    """

    def outcomes(rows: Iterable[tuple[int, Row]]) -> Iterator[DatumSpec | DataError]:
        for index, row in rows:
            try:
                sample = _sample(row, index, data, tokenizer, field=field, task_name=task_name, max_seq_len=max_seq_len)
                yield {**sample, "source": f"{source_name(reference)}{ROW}{index + 1}"}
            except DataError as error:
                yield error

    unusable = f"{field}: rows that cannot be used"
    try:
        rows = read_columns(reference, data, field=field, name=name, task_name=task_name)
    except UnusableRows as error:
        try:
            collect(outcomes(error.good.items()), rows=unusable)
        except DataError as further:
            raise DataError(f"{error}\n{further}") from error
        raise
    _check_settings_of_messages(rows.values(), data, field=field, task_name=task_name)
    rows_read = collect(outcomes(rows.items()), rows=unusable, max_bad=data.max_bad_rows)
    samples = [sample for sample in rows_read.values() if sample["length"] < max_seq_len]
    dropped = len(rows_read) - len(samples)
    if name:
        samples = [{**sample, "data_set": name} for sample in samples]
    if not samples:
        raise ConfigError(
            f"{field} must hold a prompt shorter than {max_seq_len} tokens, got {dropped} longer ones; raise rollout.maxSequenceLength"
        )
    return PromptDataset(samples=samples, dropped_overlong=dropped, sizes=(len(samples),))


def read_columns(reference: str, data: DataSpec, *, field: str, name: str = "", task_name: str) -> dict[int, Row]:
    """Read the data set `reference` and check that each column that the job names occurs in at least one row.

    Returns the rows by their index in the data set.

    Raises ConfigError for missing columns, UnusableRows for malformed lines, and DataError for both.
    """
    try:
        rows = numbered_rows(reference, field=field, name=name, max_bad_rows=data.max_bad_rows)
    except UnusableRows as error:
        if missing := list(_missing_columns(list(error.good.values()), data, field=field, task_name=task_name)):
            raise DataError("\n".join([str(error), *missing])) from error
        raise
    if missing := list(_missing_columns(list(rows.values()), data, field=field, task_name=task_name)):
        raise ConfigError("\n".join(missing))
    return rows


def _sample(
    row: Row, index: int, data: DataSpec, tokenizer: Tokenizer, *, field: str, task_name: str, max_seq_len: int
) -> DatumSpec:
    """Return a row as a sample, even if it is too long. Raises DataError for a row that cannot be used."""
    where = f"{field} row {index + 1}"
    check_row(row, data, field=field, where=where, task_name=task_name)
    prompt = prompt_of(row, data, task_name=task_name)
    log = _message_log(prompt, data, tokenizer, where=where, max_seq_len=max_seq_len)
    length = sum(len(message["token_ids"]) for message in log)
    if not length:
        raise DataError(f"{where}: a prompt must have a token, got none for {shown(prompt)}; drop the row")
    if length >= max_seq_len and data.on_overlong == "refuse":
        raise DataError(
            f"{where}: a prompt must be shorter than the sequence limit of {max_seq_len} tokens, got at least {length}; "
            "shorten it, raise rollout.maxSequenceLength or set data.onOverlong: drop"
        )
    return DatumSpec(
        message_log=log,
        chat=isinstance(prompt, list),
        length=length,
        extra_env_info=env_info(row, data, whole=task_name in PROGRAMS),
        loss_multiplier=1.0,
        idx=index,
        task_name=task_name,
    )


def check_row(row: Row, data: DataSpec, *, field: str, where: str, task_name: str) -> None:
    """Raise DataError if a row cannot be used with any tokenizer. `where` is the name of the row in the error, such as `data.train row 3`."""
    _check_travels(row, where=where)
    if task_name in ANSWERED_TASKS and not _is_answer(row.get(data.answer_key)):
        raise DataError(
            f"{where}: column {data.answer_key!r} ({_beside(field, 'answerKey')}) must hold the answer as text or number for "
            f"env.type {task_name}, "
            f"got {shown(row.get(data.answer_key))}; correct the row or {_beside(field, 'answerKey')}"
        )
    if task_name not in PROGRAMS and _ends_with_reply(prompt_of(row, data, task_name=task_name)):
        raise DataError(
            f"{where}: column {data.prompt_key!r} must end with a message to the model, got a last message of the role assistant, which the "
            f"model would read as part of its prompt; remove it, and write a reply that the environment needs in a column of its own"
        )


def prompt_of(row: Row, data: DataSpec, *, task_name: str) -> Any:
    """Return the prompt of a row: its column data.promptKey, or for rows of NeMo-Gym without it the input of their model calls.

    With `data.chat` a text is returned as one user message.
    """
    if task_name == "nemo_gym" and data.prompt_key not in row:
        params = row.get(GYM_COLUMN)
        model_input = params.get("input") if isinstance(params, Mapping) else None
        return [{"role": "user", "content": model_input}] if isinstance(model_input, str) else model_input
    prompt = row.get(data.prompt_key)
    return [{"role": "user", "content": prompt}] if data.chat and isinstance(prompt, str) and prompt else prompt


def _missing_columns(rows: Sequence[Row], data: DataSpec, *, field: str, task_name: str) -> Iterator[str]:
    """Yield a problem for each column that the job names and no row has; none where there are no rows."""
    gym = task_name == "nemo_gym" and any(GYM_COLUMN in row for row in rows)
    named = {} if gym else {"promptKey": data.prompt_key}
    default = DataSpec.model_fields["answer_key"].default  # jobs without answers keep it
    if task_name in ANSWERED_TASKS or data.answer_key != default:
        named["answerKey"] = data.answer_key
    for name, column in named.items():
        if rows and not any(column in row for row in rows):
            outer = column.partition(".")[0]
            nested = f", or write {column} of the column {outer!r} as a column of its own" * (outer in rows[0])
            yield (
                f"{field} must have the column {column!r} ({_beside(field, name)}), got {sorted(rows[0])}; "
                f"correct {_beside(field, name)}{nested}"
            )


def _beside(field: str, name: str) -> str:
    """Return the setting `name` of the data set of `field`, such as `data.sets.1.promptKey` for `data.sets.1.train`."""
    return f"{field.rpartition('.')[0]}.{name}"


def _check_settings_of_messages(rows: Iterable[Row], data: DataSpec, *, field: str, task_name: str) -> None:
    """Raise ConfigError for settings of message lists if all prompts are texts: the settings would have no effect."""
    settings = [
        name for name, text in (("systemPrompt", data.system_prompt), ("chatTemplate", data.chat_template)) if text
    ]
    if settings and not any(isinstance(prompt_of(row, data, task_name=task_name), list) for row in rows):
        raise ConfigError(
            f"{field} must hold message lists for data.{settings[0]}, got text prompts, which are taken as they are; "
            f"set data.chat: true, write prompts as lists of {{role, content}}, or remove data.{settings[0]}"
        )


def _is_answer(value: Any) -> bool:
    """Return whether `value` can be a ground truth: text that is not blank, or a finite number."""
    if isinstance(value, str):
        return bool(value.strip())
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))


def _check_travels(row: Row, *, where: str) -> None:
    """Raise DataError for values that cannot be sent to rollouts, such as dates, decimals and integers beyond 64 bits."""
    try:
        frames.encode(row)
    except (TypeError, ValueError, RecursionError) as error:
        cause = str(error).partition(";")[0]
        raise DataError(
            f"{where}: values must be text, numbers of 64 bits, lists or maps: {cause}; write the value as text"
        ) from error


def env_info(row: Row, data: DataSpec, *, whole: bool = False) -> dict[str, Any]:
    """Return the environment's metadata of a row: its columns without the prompt, and the answer also as `ground_truth`.

    `whole` is for programs that write the prompt themselves: they get the row as it is.
    """
    if whole:
        return dict(row)
    info = {key: value for key, value in row.items() if key != data.prompt_key}
    if data.answer_key in row:
        info["answer"] = info["ground_truth"] = row[data.answer_key]
    return info


def _message_log(prompt: Any, data: DataSpec, tokenizer: Tokenizer, *, where: str, max_seq_len: int) -> list[Any]:
    if isinstance(prompt, str) and prompt:
        ids = tokenizer(head_of(prompt, tokenizer, max_seq_len))["input_ids"]
        return [{"role": "user", "content": prompt, "token_ids": np.asarray(ids, dtype=np.int64)}]
    if isinstance(prompt, list) and prompt and all(_is_message(message) for message in prompt):
        # In a parquet column every message has the keys of all messages, with None where it has no value.
        messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
        if data.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": data.system_prompt})
        try:
            return _render(messages, data, tokenizer, max_seq_len)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    raise DataError(
        f"{where}: column {data.prompt_key!r} must be text or a list of {{role, content}} with roles {sorted(CHAT_ROLES)}, "
        f"got {str(prompt)[:80]!r}; correct the row"
    )


def _ends_with_reply(prompt: Any) -> bool:
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    return isinstance(last, Mapping) and last.get("role") == "assistant"


def _is_message(message: Any) -> bool:
    if not isinstance(message, Mapping):
        return False
    role = message.get("role")
    return isinstance(role, str) and role in CHAT_ROLES and isinstance(message.get("content"), str)


def _render(messages: list[dict[str, Any]], data: DataSpec, tokenizer: Tokenizer, max_seq_len: int) -> list[Any]:
    """Return the messages with their tokens: the whole conversation is rendered and tokenized once, and split at the messages' ends.

    If the template does not render the first messages as a prefix of the whole text, or refuses them, their tokens go to the next message.
    The concatenated tokens are always those of the whole conversation.
    """
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, template=data.chat_template)
    text = head_of(text, tokenizer, max_seq_len)
    ids, starts = tokenizer.encode_with_offsets(text)
    ends = [0]
    for count in range(1, len(messages)):
        try:
            prefix = tokenizer.apply_chat_template(messages[:count], template=data.chat_template)
        except ConfigError:  # many templates require a user message, or one at the end
            prefix = None
        ends.append(max(ends[-1], len(prefix)) if prefix is not None and text.startswith(prefix) else ends[-1])
    borders = [*np.searchsorted(np.asarray(starts), ends).tolist(), len(ids)]
    return [
        {
            "role": message["role"],
            "content": message["content"],
            "token_ids": np.asarray(ids[begin:end], dtype=np.int64),
        }
        for message, begin, end in zip(messages, borders, borders[1:], strict=False)
    ]
