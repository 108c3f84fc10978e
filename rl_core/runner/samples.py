"""Writes samples of training and validation to `samples/` in the output folder, so that users can read completions.

The samples of a step are requested from the data ranks; a thread waits for the answers and writes them. Writing never blocks a step or makes
it fail: samples that arrive too late or cannot be written are left out.
"""

import concurrent.futures
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rl_core.api.errors import RLJobError
from rl_core.api.settings import SamplesSpec
from rl_core.messages.samples import KeptSample, StepSamples
from rl_core.observability.trackers import SampleRow, Trackers
from rl_core.runner.step_state import FilteredGroup
from rl_core.samples.lines import TRAIN, VALIDATION, sample_line
from rl_core.samples.writer import SampleWriter

logger = logging.getLogger(__name__)
MOST_WAITING = 8
"""Largest number of waiting writes. A step has at most three. Further writes are left out, so that slow storage does not fill the memory."""
ANSWER_SECONDS = 60.0
"""Seconds that the writing thread waits for the samples of the data ranks."""
CLOSE_SECONDS = 10.0
"""Seconds that the end of a run waits until its last samples are written."""
TABLE_ROWS = 8
"""Largest number of samples of a step that trackers receive as a table."""


class Answer(Protocol):
    """A group call in progress. Implemented by `WorkerGroupFuncResult`."""

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Return the values in rank order."""


class Samples:
    """Writes the samples of one run. All methods return at once, except `close`."""

    def __init__(
        self,
        spec: SamplesSpec,
        folder: Path,
        *,
        epoch: int,
        decode: Callable[[int], str],
        trackers: Trackers,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Write samples below `folder`, as `spec.samples` of the job says.

        `epoch` is stored with each sample, `decode(id)` returns the text of a token, `trackers` receive a table of each step, and `wall()`
        returns the time of day in seconds since 1970.
        """
        self._spec, self._epoch, self._decode, self._wall = spec, epoch, decode, wall
        self._trackers = trackers
        self._token_texts: dict[int, str] = {}
        self._writer = SampleWriter(folder, limit=spec.megabytes * 10**6)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="samples")
        self._waiting: list[Future[None]] = []
        self._num_dropped = 0

    def add_step(self, step: int, version: int, ask: Callable[[], Answer]) -> None:
        """Write samples of training step `step`, which trained policy `version`.

        `ask()` starts the call of `take_samples` on the data ranks and returns without waiting.
        """
        if self._spec.groups:
            self._submit_answer(
                f"step {step}", ask, lambda parts: self._write_step(step, version, [part for part in parts if part])
            )

    def add_validation(self, step: int, version: int, samples: Sequence[KeptSample]) -> None:
        """Write samples of the validation after training step `step`, of policy `version`."""
        if samples:
            self._submit(lambda: self._write(VALIDATION, step, version, samples, {}))

    def add_failed(self, step: int, version: int, samples: Sequence[KeptSample]) -> None:
        """Write samples that made their groups fail in training step `step`: at most `spec.samples.groups` of them."""
        if selected := samples[: self._spec.groups]:
            self._submit(lambda: self._write(TRAIN, step, version, selected, {}))

    def add_filtered(self, groups: Sequence[FilteredGroup], ask: Callable[[], Answer]) -> None:
        """Write all samples of `groups`, which dynamic sampling discarded.

        `ask()` starts the call of `read_samples` on the actor and returns without waiting.
        """
        if groups:
            self._submit_answer(
                f"filtered groups of step {groups[0].step}", ask, lambda parts: self._write_filtered(groups, parts)
            )

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write the waiting samples and close the files. Samples that are not written within `seconds` are left out."""
        self._pool.shutdown(wait=False)
        _, unwritten = concurrent.futures.wait(self._waiting, seconds)
        if unwritten:
            self._pool.shutdown(wait=False, cancel_futures=True)
            logger.warning("the last samples are not kept: their writes took more than %.0f s", seconds)
            return
        self._writer.close()

    def _submit(self, write: Callable[[], None]) -> None:
        self._waiting = [future for future in self._waiting if not future.done()]
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(self._pool.submit(self._guarded, write))
            return
        self._num_dropped += 1
        if self._num_dropped == 1:
            logger.warning("samples are written more slowly than steps end; those of some steps are left out")

    def _guarded(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception:
            logger.exception("samples of a step are not kept")

    def _submit_answer(self, description: str, ask: Callable[[], Answer], write: Callable[[list[Any]], None]) -> None:
        """Ask the actor now; `write` its answer, the values in rank order, on the writing thread."""
        try:
            answer = ask()
        except RLJobError as error:
            logger.info("the samples of %s are not kept: %s", description, error)
            return

        def receive() -> None:
            try:
                parts = answer.wait(ANSWER_SECONDS)
            except Exception as error:  # noqa: BLE001 - a rank was lost or is late: the loop deals with it
                logger.info("the samples of %s are not kept: %s", description, error)
                return
            write(parts)

        self._submit(receive)

    def _write_step(self, step: int, version: int, parts: Sequence[StepSamples]) -> None:
        log_probs = {row: values for part in parts for row, values in part.log_probs}
        samples = sorted((sample for part in parts for sample in part.samples), key=lambda sample: sample.row)
        self._write(TRAIN, step, version, samples, log_probs)

    def _write_filtered(self, groups: Sequence[FilteredGroup], parts: Sequence[Sequence[KeptSample]]) -> None:
        for group in groups:
            samples = [
                replace(sample, filtered=group.why)
                for part in parts
                for sample in part
                if sample.group_id == group.group_id
            ]
            self._write(TRAIN, group.step, group.version, samples, {})

    def _write(
        self,
        split: str,
        step: int,
        version: int,
        samples: Sequence[KeptSample],
        log_probs: "dict[int, np.ndarray[Any, np.dtype[np.float32]]]",
    ) -> None:
        if not samples:
            return
        now = self._wall()
        token_texts = [[self._piece(token_id) for token_id in sample.token_ids.tolist()] for sample in samples]
        samples = [_with_texts(sample, texts) for sample, texts in zip(samples, token_texts, strict=True)]
        lines = [
            sample_line(
                sample,
                split=split,
                step=step,
                epoch=self._epoch,
                version=version,
                trainer=log_probs.get(sample.row),
                pieces=texts,
                wall=now,
            )
            for sample, texts in zip(samples, token_texts, strict=True)
        ]
        self._writer.write(lines, name=f"e{self._epoch:04d}-s{step:07d}")
        if rows := [_row(sample) for sample in samples[:TABLE_ROWS] if not sample.filtered]:
            self._trackers.add_samples(split, step, rows)

    def _piece(self, token: int) -> str:
        """Return the text of a token. Texts are cached, because most tokens occur many times."""
        text = self._token_texts.get(token)
        if text is None:
            text = self._token_texts[token] = self._decode(token)
        return text


def _row(sample: KeptSample) -> SampleRow:
    num_prompt = sample.prompt_messages
    texts = [
        "\n".join(text for _, text, _ in part) for part in (sample.messages[:num_prompt], sample.messages[num_prompt:])
    ]
    return SampleRow(sample.group_id, sample.index, sample.reward, sample.reason, *texts)


def _with_texts(sample: KeptSample, token_texts: Sequence[str]) -> KeptSample:
    """Return a copy of `sample` in which messages with tokens but without text have the text of their tokens.

    `token_texts` are the texts of all tokens of the sample, in order. Messages without text come from programs that send token ids. A completion
    without text is not changed: the model ended it at once.
    """
    messages, start = [], 0
    for role, content, count in sample.messages:
        messages.append(
            (role, content if content or role == "assistant" else "".join(token_texts[start : start + count]), count)
        )
        start += count
    return replace(sample, messages=tuple(messages))
