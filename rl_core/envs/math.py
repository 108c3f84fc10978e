"""The environment `math`: scores one completion against `metadata["ground_truth"]`."""

import logging
import re
from collections.abc import Callable, Sequence
from decimal import Context, Decimal, localcontext
from typing import Any, Literal

from pydantic import Field

from rl_core.api.errors import ConfigError, RolloutDataFailure
from rl_core.api.records import EnvironmentInterface, EnvironmentReturn
from rl_core.envs.base import EnvConfig, Log, last_assistant_text, parse_config, single_turn_return
from rl_core.envs.cpu_time import CpuLimitReached, cpu_limit
from rl_core.envs.metrics import math_metrics

Verdict = tuple[bool, str | None]
"""(whether the answer is right, the text that was taken as the answer or None)."""
Comparator = Callable[[str, str], Verdict]
"""f(completion, ground truth); raises ValueError when the ground truth cannot be read."""

NUMBER = re.compile(
    r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s*/\s*\d+(?:\.\d+)?)?"
)


class MathConfig(EnvConfig):
    """Options of `math`."""

    comparator: Literal["math_verify", "exact", "numeric"] = "math_verify"
    """math_verify: symbolic, reads LaTeX; numeric: the last number; exact: equal text."""
    correct: float = 1.0
    """Reward of a right answer."""
    incorrect: float = 0.0
    """Reward of a wrong or unreadable answer."""
    tolerance: float = Field(1e-6, ge=0)
    """numeric: accepted difference, relative to max(1, |ground truth|)."""
    cpu_seconds: float = Field(5.0, gt=0)
    """math_verify: CPU time for reading or comparing one answer; beyond it the answer counts as unreadable."""


class MathEnvironment(EnvironmentInterface):
    """Scores the last assistant text of each log and ends the episode.

    The field `answers` of its result holds the text that was taken as the answer.
    """

    config_model = MathConfig

    def __init__(self, cfg: Any = None) -> None:
        self.config = parse_config(MathConfig, cfg)
        self._compare: Comparator = _comparator(self.config)

    def step(
        self, message_log_batch: Sequence[Log], metadata_batch: Sequence[dict[str, Any] | None]
    ) -> EnvironmentReturn:
        """Return rewards [B]. Raises RolloutDataFailure for a ground truth that is missing or unreadable."""
        rewards: list[float | None] = []
        answers: list[str | None] = []
        for row, (log, metadata) in enumerate(zip(message_log_batch, metadata_batch, strict=True)):
            is_correct, answer = self._score(row, last_assistant_text(log), metadata)
            rewards.append(self.config.correct if is_correct else self.config.incorrect)
            answers.append(answer)
        return single_turn_return(rewards, metadata_batch, answers)

    def _score(self, row: int, completion: str, metadata: dict[str, Any] | None) -> Verdict:
        truth = (metadata or {}).get("ground_truth")
        if not isinstance(truth, str | int | float) or isinstance(truth, bool):
            raise RolloutDataFailure(
                f"environment math, row {row}: metadata must hold ground_truth as text or number, got {truth!r}; "
                "check data.answerKey"
            )
        try:
            return self._compare(completion, str(truth))
        except ValueError as error:
            raise RolloutDataFailure(f"environment math, row {row}: {error}") from error

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Return the batch unchanged and accuracy, pass@k and lengths over its unmasked samples (see `metrics`)."""
        return batch, math_metrics(batch, correct=self.config.correct)


def _comparator(config: MathConfig) -> Comparator:
    if config.comparator == "exact":
        return compare_exact
    if config.comparator == "numeric":
        return lambda completion, truth: compare_numeric(completion, truth, tolerance=config.tolerance)
    return MathVerify(cpu_seconds=config.cpu_seconds)


def final_answer(text: str) -> str:
    """Return the last balanced `\\boxed{...}`, else the text after the last `####`, else all of it; stripped."""
    start = text.rfind("\\boxed{")
    if start >= 0:
        depth = 0
        for end in range(start + 6, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start + 7 : end].strip()
    return text.rpartition("####")[2].strip()


def compare_exact(completion: str, truth: str) -> Verdict:
    """Compare the final answer with the ground truth as text, without surrounding blanks. Raises ValueError for an empty ground truth."""
    if not truth.strip():
        raise ValueError(f"ground_truth must hold text, got {truth!r}; silence would be the right answer, drop the row")
    answer = final_answer(completion)
    return answer == truth.strip(), answer or None


def compare_numeric(completion: str, truth: str, *, tolerance: float = 1e-6) -> Verdict:
    """Compare the last number of the final answer (decimals, a/b, thousands commas) with that of the ground truth.

    Raises ValueError for a ground truth without a number.
    """
    with localcontext(Context(prec=50, traps=[])):  # out-of-range values become infinite or NaN and raise nothing
        expected = _last_number(truth)
        if expected is None:
            raise ValueError(
                f"ground_truth must hold a number for comparator numeric, got {truth!r}; use another comparator"
            )
        answer = _last_number(final_answer(completion))
        if answer is None:
            return False, None
        allowed_error = Decimal(str(tolerance)) * max(Decimal(1), abs(expected[0]))
        return bool(abs(answer[0] - expected[0]) <= allowed_error), answer[1]


def _last_number(text: str) -> tuple[Decimal, str] | None:
    """Return the last number in `text` as value and text; None if there is none or it is not finite."""
    matches = NUMBER.findall(text.replace("\u2212", "-"))  # U+2212, the minus sign of typeset text.
    if not matches:
        return None
    numerator, _, denominator = matches[-1].replace(",", "").partition("/")
    value = Decimal(numerator) / Decimal(denominator) if denominator else Decimal(numerator)
    return (value, matches[-1]) if value.is_finite() else None


class MathVerify:
    """Comparator over the math-verify package: symbolic equality of LaTeX and plain expressions."""

    def __init__(self, *, cpu_seconds: float) -> None:
        try:
            import math_verify
        except ImportError as error:
            raise ConfigError(
                "env.options.comparator: math_verify needs the package math-verify: pip install 'rljob[env]', "
                "or use comparator numeric or exact"
            ) from error
        # The library would warn that its own wall-clock limits are disabled.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._parse, self._verify = math_verify.parse, math_verify.verify
        self._cpu_seconds = cpu_seconds

    def __call__(self, completion: str, truth: str) -> Verdict:
        """Return the verdict. Raises ValueError for an unreadable ground truth and for a crash of the comparison."""
        expected = self._ground_truth(truth)
        try:
            with cpu_limit(self._cpu_seconds):
                parsed = self._parse(completion, parsing_timeout=None)
                answer = next((str(part) for part in parsed if isinstance(part, str)), None)
                return bool(self._verify(expected, parsed, timeout_seconds=None, raise_on_error=True)), answer
        except CpuLimitReached:
            return False, None
        except Exception as error:  # sympy may raise anything.
            raise ValueError(
                f"math-verify failed on {completion[-80:]!r} against {truth!r}: {type(error).__name__}: {error}"
            ) from error

    def _ground_truth(self, truth: str) -> list[Any]:
        text = truth if "\\boxed{" in truth or "$" in truth else f"\\boxed{{{truth}}}"
        try:
            with cpu_limit(self._cpu_seconds):
                expected: list[Any] = self._parse(text, parsing_timeout=None)
        except CpuLimitReached:
            expected = []
        if all(isinstance(part, str) for part in expected):
            raise ValueError(f"ground_truth must be readable by math-verify, got {truth!r}; use comparator exact")
        return expected
