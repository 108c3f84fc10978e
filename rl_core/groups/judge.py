"""A group that scores conversations with a language model that writes its verdict.

groups:
- name: judge
  worker: rl_core.groups.judge:Judge
  callers: [env]
  config: {modelPath: /models/judge}
env: {type: reward_model, options: {group: judge}}
"""

import asyncio
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import Field, model_validator

from rl_core.api.errors import ConfigError, DataError, shown
from rl_core.api.rewards import EXPLANATION, bounded_explanation
from rl_core.api.user_code import describe, import_function
from rl_core.envs.base import last_assistant_text, parse_config, prompt_text
from rl_core.groups.model import ModelConfig, conversation_ids, load, load_tokenizer
from rl_core.plan.groups import ACTOR, ENV, ROLLOUT
from rl_core.rollouts.generation import EngineGenerator
from rl_core.rollouts.hf.engine import HFEngine
from rl_core.rollouts.hf.loop import EngineLoop
from rl_core.rollouts.sampling import SamplingParams, sample_seed
from rl_core.workers.worker import Worker

TEMPLATE = """\
Grade the answer to the question with a number from {{ minimum }} (wrong or useless) to {{ maximum }} (correct and complete).

Question:
{{ prompt }}

Answer:
{{ completion }}

Give your reasons in one or two sentences. Then write the grade as <score>number</score>.
"""
Result = float | dict[str, Any]
"""A score, `{score, explanation}` or `{error}`."""
SCORE = re.compile(r"<score>\s*([-+]?\d+(?:\.\d+)?)\s*</score>")


class JudgeConfig(ModelConfig):
    """Options of `Judge`."""

    template: str = Field(TEMPLATE, min_length=1)
    """Jinja template of the message to the judge. Variables: `prompt` and `completion` (texts), `messages` (the conversation), `columns`
    (of the data row), `minimum`, `maximum`."""
    parser: str | None = Field(None, min_length=1)
    """`module:function` that returns the score of an answer of the judge (text), or None if it has none; null = the number between the last
    <score> and </score>. An exception also means that the answer has none."""
    minimum: float = 0.0
    """Lowest score; an answer with a lower one counts as an answer without a score."""
    maximum: float = 10.0
    """Highest score; likewise."""
    attempts: int = Field(3, ge=1)
    """Answers that are generated, each with another seed, until one has a score. If none has, the row fails."""
    temperature: float = Field(0.7, ge=0)
    """Sampling temperature of the judge; above 0 if attempts > 1, because a greedy judge would repeat its answer."""
    seed: int = 0
    """Seed of the judge. The same conversation and seed get the same score."""
    max_new_tokens: int = Field(512, ge=1)
    """Most tokens of an answer."""
    stop_strings: list[str] = ["</score>"]
    """Texts that end an answer; they are part of it."""
    chat_template: str | None = None
    """Jinja chat template of the judge; null = that of its tokenizer. Where neither has one, the message is given as it is."""
    max_length: int | None = Field(None, ge=2)
    """Tokens of message and answer together; a row with more is a failure of its sample. null = the positions of the model."""
    max_batch: int = Field(32, ge=1)
    """Most answers that are generated at once; further ones wait."""

    @model_validator(mode="after")
    def _check(self) -> "JudgeConfig":
        if self.minimum >= self.maximum:
            raise ValueError(f"minimum must be below maximum, got {self.minimum:g} and {self.maximum:g}; correct one")
        if self.attempts > 1 and self.temperature == 0:
            raise ValueError(
                f"temperature must be above 0 with attempts {self.attempts}, because a greedy judge repeats its answer, got 0; "
                "raise it, or set attempts: 1"
            )
        return self


class Judge(Worker):
    """Scores conversations: generates an answer about each with the HF engine, and reads a number from the answer."""

    peer_methods: ClassVar[Mapping[str, frozenset[str]]] = dict.fromkeys((ENV, ROLLOUT, ACTOR), frozenset({"score"}))

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Load the model of `config`. Raises ConfigError when it, the template or the parser cannot be used."""
        from transformers import AutoModelForCausalLM

        self._config = parse_config(JudgeConfig, config, where="config")
        self._parse = _parser(self._config.parser)
        try:
            self._template = ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string(self._config.template)
        except TemplateError as error:
            raise ConfigError(f"config.template: must be a Jinja template, got {error}; correct it") from error
        model = load(AutoModelForCausalLM, self._config, device=self.device)
        self._tokenizer = load_tokenizer(self._config)
        length = self._config.max_length or getattr(model.config, "max_position_embeddings", None) or 2**15
        if length <= self._config.max_new_tokens:
            raise ConfigError(
                f"config.maxNewTokens: must be below the {length} tokens of message and answer, got {self._config.max_new_tokens}; lower it"
            )
        self._max_message_tokens = length - self._config.max_new_tokens
        """Most tokens of a message to the judge."""
        eos = model.generation_config.eos_token_id
        engine = HFEngine(
            model,
            self._tokenizer,
            max_batch=self._config.max_batch,
            max_seq_len=length,
            eos_token_ids=eos if isinstance(eos, list) else [] if eos is None else [eos],
        )
        self._loop = EngineLoop(engine, on_tokens=lambda tokens: self.record_progress("judge_tokens", tokens))
        params = SamplingParams(
            max_new_tokens=self._config.max_new_tokens,
            temperature=self._config.temperature,
            stop_strings=tuple(self._config.stop_strings),
        )
        self._generator = EngineGenerator(self._loop, params)
        self.counts: Counter[str] = Counter(answers=0, retries=0, failures=0)
        """Answers that were generated, those among them that repeat an attempt, and rows that got no score."""
        self.report_metrics(lambda: {f"judge/{name}_total": float(count) for name, count in self.counts.items()})

    async def score(self, rows: Sequence[Mapping[str, Any] | Sequence[Mapping[str, Any]]]) -> list[Result]:
        """Return the score of each row: a conversation of {role, content}, or a mapping with one in `messages` and its `columns`.

        A mapping with `explain` true gets `{"score": number, "explanation": answer}`, with the answer of the judge that has the score. A
        row that got no score in all attempts, is too long, or has no column that the template needs, has `{"error": why}` instead. Rows of
        several calls share the engine's batch. Raises DataError for a row that is no conversation, GenerationUnavailable when the engine
        fails.
        """
        return list(await asyncio.gather(*map(self._score, rows)))

    def close(self) -> None:
        """Stop the engine."""
        self._loop.close()

    async def _score(self, row: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Result:
        try:
            message = self._message(row)
        except TemplateError as error:
            return self._failure(f"config.template must render with the row, got {error}; correct it or the data")
        ids = conversation_ids(
            self._tokenizer,
            [{"role": "user", "content": message}],
            template=self._config.chat_template,
            generate=True,
        )
        if not 1 <= len(ids) <= self._max_message_tokens:
            return self._failure(
                f"a message to the judge must have 1 to {self._max_message_tokens} tokens, got {len(ids)}"
            )
        reason = ""
        for attempt in range(1, self._config.attempts + 1):
            self.counts["retries"] += attempt > 1
            output = await self._generator.generate_row(ids, seed=sample_seed(self._config.seed, message, 0, attempt))
            self.counts["answers"] += 1
            answer = self._tokenizer.decode(output.ids, skip_special_tokens=True)
            score, reason = self._read(answer)
            if score is not None:
                explain = isinstance(row, Mapping) and row.get("explain")
                return {"score": score, EXPLANATION: bounded_explanation(answer)} if explain else score
        return self._failure(f"the judge gave no score in {self._config.attempts} answers, in the last one {reason}")

    def _message(self, row: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> str:
        """Return the message to the judge about `row`. Raises TemplateError and DataError."""
        messages = row["messages"] if isinstance(row, Mapping) else row
        if not all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in messages):
            raise DataError(
                f"a conversation must be a list of {{role, content}}, got {messages!r:.200}; correct the call"
            )
        text: str = self._template.render(
            prompt=prompt_text(messages),
            completion=last_assistant_text(messages),
            messages=messages,
            columns=row.get("columns", {}) if isinstance(row, Mapping) else {},
            minimum=f"{self._config.minimum:g}",
            maximum=f"{self._config.maximum:g}",
        )
        return text

    def _read(self, answer: str) -> tuple[float | None, str]:
        """Return (score of `answer`, ""), or (None, why it has none)."""
        try:
            parsed = self._parse(answer)
            score = None if parsed is None else float(parsed)
        except Exception as error:  # noqa: BLE001 - code of the user may raise anything
            return None, f"the parser raised {describe(error)} for {shown(answer)}"
        if score is None:
            return None, f"no score was found: {shown(answer)}"
        low, high = self._config.minimum, self._config.maximum
        if not (math.isfinite(score) and low <= score <= high):
            return None, f"the score is not in [{low:g}, {high:g}]: {shown(answer)}"
        return score, ""

    def _failure(self, reason: str) -> dict[str, str]:
        self.counts["failures"] += 1
        return {"error": reason}


def _parser(reference: str | None) -> Callable[[str], Any]:
    """Return the user's parser, or that of numbers between markers. Raises ConfigError."""
    if reference is None:
        return marked_number
    return import_function(reference, field="config.parser")


def marked_number(answer: str) -> float | None:
    """Return the number between the last <score> and </score> of `answer`, None where there is none."""
    matches = SCORE.findall(answer)
    return float(matches[-1]) if matches else None
