"""`RowProgress`: a row that the engine may abort and that is then resumed from its tokens.

Every output of the engine has ids, log-probabilities and versions, which are appended. An aborted row is requested again with prompt +
ids so far as its prompt.
"""

from __future__ import annotations

from typing import Any

from rl_core.api.errors import GenerationUnavailable, RolloutDataFailure
from rl_core.api.records import FinishReason
from rl_core.messages.engine import EngineOutput, EngineRow
from rl_core.rollouts.hf.stopping import StopStrings, longest_stop
from rl_core.rollouts.rows import GenerationOutput, Row, Sink, token_limit

MAX_RESUMPTIONS = 8
"""How often an aborted row is resumed before it fails as GenerationUnavailable."""
WHOLE_VOCABULARY = -1
"""SGLang's value of top_k for no limit."""


class RowProgress:
    """A row and what the engine has generated of it so far."""

    def __init__(
        self,
        number: int,
        row: Row,
        sink: Sink,
        max_seq_len: int,
        eos_token_ids: frozenset[int],
        stop_strings: StopStrings,
    ) -> None:
        """`number` identifies the row in the child process; `sink` gets its result."""
        self.number, self.row, self.sink = number, row, sink
        self._stop_strings = stop_strings
        self._limit, self._limit_reason = token_limit(len(row.prompt), row.params, max_seq_len)
        self._stop_ids = sorted(row.params.stop_ids(eos_token_ids))
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[tuple[int, int, int]] = []
        self._resumptions = 0
        self._reported = 0
        """Number of ids that were reported while the row ran."""

    @property
    def empty(self) -> GenerationOutput | None:
        """Return the output of a row that has no room for a token, None for other rows. The engine need not prefill such a row."""
        if self._limit > 0:
            return None
        return GenerationOutput(ids=[], logprobs=[], finish_reason=self._limit_reason, versions=[])

    def request(self) -> EngineRow:
        """Return the next request to the engine: the prompt with the ids generated so far, and the remaining number of tokens."""
        params = self.row.params
        sampling: dict[str, Any] = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": WHOLE_VOCABULARY if params.top_k is None else params.top_k,
            "max_new_tokens": self._limit - len(self._ids),
            "no_stop_trim": True,
            "ignore_eos": params.ignore_eos,
        }
        if self._stop_ids:
            sampling["stop_token_ids"] = self._stop_ids
        if params.min_p:
            sampling["min_p"] = params.min_p
        if params.logit_bias:
            sampling["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
        if params.stop_strings:
            sampling["stop"] = list(params.stop_strings)
        return EngineRow(
            key=self.number,
            ids=[*self.row.prompt, *self._ids],
            sampling=sampling,
            stream=self.row.on_tokens is not None,
        )

    def stream(self, ids: list[int]) -> None:
        """Report new ids of the row to its caller.

        Not those of a resumed row with stop strings: the row may end before them (`_stop`). Its caller gets them with the output.
        """
        if self.row.on_tokens is not None and not (self._resumptions and self.row.params.stop_strings):
            self._reported += len(ids)
            self.row.on_tokens(ids)

    def append(self, output: EngineOutput) -> GenerationOutput | BaseException | None:
        """Append an output of the engine. Returns the row's output or failure, or None if the row was aborted and must be requested again."""
        if output.reason == "error":
            return (RolloutDataFailure if output.data_fault else GenerationUnavailable)(
                f"the engine failed the row: {output.message}"
            )
        start = len(self._ids)
        self._ids += output.ids
        if output.reason == "abort" and self._reported < len(self._ids):
            self.stream(self._ids[self._reported :])  # Ids of the step in which the row was aborted.
        self._logprobs += output.logprobs
        try:
            self._versions += [(start + a, start + b, int(version)) for a, b, version in output.versions if b > a]
        except ValueError:
            return GenerationUnavailable(f"the engine served weights of no version: {output.versions}")
        stopped = output.reason == "stop"
        if self._resumptions and (end := self._stop(start)) is not None:
            stopped = True
            del self._ids[end:], self._logprobs[end:]
            self._versions = [(a, min(b, end), version) for a, b, version in self._versions if a < end]
        elif output.reason == "abort" and len(self._ids) < self._limit:
            self._resumptions += 1
            if self._resumptions > MAX_RESUMPTIONS:
                return GenerationUnavailable(f"a row was aborted {self._resumptions} times: {output.message}")
            return None
        return GenerationOutput(
            ids=self._ids,
            logprobs=self._logprobs,
            finish_reason=FinishReason.STOP.value if stopped else self._limit_reason,
            versions=_joined(self._versions),
        )

    def _stop(self, start: int) -> int | None:
        """Return the number of ids up to the end of a stop string that began before id `start` and ends after it, None if there is none.

        The engine does not see such a string: it looks for stop strings in what it generates, and a resumed row has the ids before `start`
        in its prompt.
        """
        strings = self.row.params.stop_strings
        if not strings:
            return None
        ends = range(start + 1, min(len(self._ids), start + longest_stop(strings)) + 1)
        return next((end for end in ends if self._stop_strings.completed(strings, self._ids[:end])), None)


def _joined(versions: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return the ranges with adjacent ranges of the same version merged."""
    merged: list[tuple[int, int, int]] = []
    for start, end, version in versions:
        if merged and merged[-1][2] == version and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end, version)
        else:
            merged.append((start, end, version))
    return merged
