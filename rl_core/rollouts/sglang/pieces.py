"""One row on its way through the engine, put together from its pieces: what the engine aborted goes on from where it was.

A piece has ids, log-probabilities and versions; the next one continues prompt + ids so far. Nothing of an earlier piece is lost.
"""

from __future__ import annotations

from typing import Any

from rl_core.api.errors import GenerationUnavailable, RolloutDataFailure
from rl_core.api.records import FinishReason
from rl_core.messages.engine import EngineOutput, EngineRow
from rl_core.rollouts.padding import GenerationOutput
from rl_core.rollouts.rows import Row, Sink

MOST_RESUMPTIONS = 8
"""How often a row goes on after an abort, before it fails as infrastructure."""
WHOLE_VOCABULARY = -1


class Running:
    """A row and what the engine has made of it."""

    def __init__(self, number: int, row: Row, sink: Sink, max_seq_len: int, eos_token_ids: frozenset[int]) -> None:
        """`number` is the row's key in the child; `sink` gets its result."""
        self.number, self.row, self.sink = number, row, sink
        room = max_seq_len - len(row.prompt)
        self._limit = min(row.params.max_new_tokens, room)
        cut = room < row.params.max_new_tokens
        self._limit_reason = (FinishReason.SEQ_LIMIT if cut else FinishReason.LENGTH).value
        self._stop_ids = sorted({*row.params.stop_token_ids} | (set() if row.params.ignore_eos else eos_token_ids))
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[tuple[int, int, int]] = []
        self._resumptions = 0

    @property
    def empty(self) -> GenerationOutput | None:
        """Return the result of a row that has room for no token, None for all others: the engine would compute its prompt for it."""
        if self._limit > 0:
            return None
        return GenerationOutput(ids=[], logprobs=[], finish_reason=self._limit_reason, versions=[])

    def request(self) -> EngineRow:
        """Return what the engine is to go on with."""
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
        if params.stop_strings:
            sampling["stop"] = list(params.stop_strings)
        return EngineRow(key=self.number, ids=[*self.row.prompt, *self._ids], sampling=sampling)

    def take(self, output: EngineOutput) -> GenerationOutput | BaseException | None:
        """Add a piece; return the row's result, None when it is to go on."""
        if output.reason == "error":
            return (RolloutDataFailure if output.data_fault else GenerationUnavailable)(
                f"the engine failed the row: {output.message}"
            )
        start = len(self._ids)
        self._ids += output.ids
        self._logprobs += output.logprobs
        try:
            self._versions += [(start + a, start + b, int(version)) for a, b, version in output.versions if b > a]
        except ValueError:
            return GenerationUnavailable(f"the engine served weights of no version: {output.versions}")
        if output.reason == "abort" and len(self._ids) < self._limit:
            self._resumptions += 1
            if self._resumptions > MOST_RESUMPTIONS:
                return GenerationUnavailable(f"a row was aborted {self._resumptions} times: {output.message}")
            return None
        stopped = output.reason == "stop"
        return GenerationOutput(
            ids=self._ids,
            logprobs=self._logprobs,
            finish_reason=FinishReason.STOP.value if stopped else self._limit_reason,
            versions=_joined(self._versions),
        )


def _joined(versions: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return the ranges with neighbours of one version made one."""
    found: list[tuple[int, int, int]] = []
    for start, end, version in versions:
        if found and found[-1][2] == version and found[-1][1] == start:
            found[-1] = (found[-1][0], end, version)
        else:
            found.append((start, end, version))
    return found
