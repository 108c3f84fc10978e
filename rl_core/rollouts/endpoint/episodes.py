"""`Episodes`: the sessions that a rollout serves. A session belongs to one sample of a leased group; its API key is the sample's.

    open -> its key is valid -> calls are generated and recorded -> close -> calls in progress are dropped, its key is refused

The program that calls gets the key with a name for its run behind it (`KEY.RUN`). If the program is started again for the same sample, the
first call of the new run empties the session and ends the old run, so that the recorded calls are always those of one run.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from rl_core.api.errors import ConfigError, RolloutDataFailure
from rl_core.api.records import FinishReason
from rl_core.rollouts.chat_template import ChatTemplate
from rl_core.rollouts.endpoint import history
from rl_core.rollouts.endpoint.errors import EndpointError, bad_request, not_permitted
from rl_core.rollouts.endpoint.session import Prompt, Session
from rl_core.rollouts.generation import RowGenerator
from rl_core.rollouts.rows import GenerationOutput, OnTokens
from rl_core.rollouts.sampling import sample_seed

T = TypeVar("T")
REMEMBERED_KEYS = 4096
"""Number of closed sessions whose keys are remembered, so that they can be distinguished from keys that never existed."""
CONTEXT_LENGTH = "context_length_exceeded"
"""Code of the refusal of a call whose messages leave no room for a reply."""
CALLS_AT_ONCE = 64
"""Most calls of one session that are generated at the same time; further ones are refused with status 429."""
RUNS = 8
"""Runs of a session that are remembered as ended."""


@dataclass(eq=False, slots=True)
class AgentEpisode:
    """The session of one sample and how its tokens are generated."""

    key: str
    """API key, without the name of a run."""
    name: str
    """Sample id, for logs."""
    session: Session
    generator: RowGenerator
    seed: int
    max_seq_len: int
    max_calls: int
    greedy: bool = False
    run: str = ""
    """The run whose calls are recorded; "" before the first call."""
    cut: str | None = None
    """`seq_limit` once a call was refused because its messages leave no room for a reply."""
    recorded: deque[GenerationOutput] | None = None
    """What the policy sampled in the present call on an earlier rollout, one output per choice; None = calls are generated."""
    ended: bool = False
    _old_runs: deque[str] = field(default_factory=lambda: deque(maxlen=RUNS))
    _calls: set[asyncio.Task[Any]] = field(default_factory=set)
    _count: int = 0

    async def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None,
        stop_strings: Sequence[str],
        on_tokens: OnTokens | None = None,
    ) -> tuple[GenerationOutput, tuple[float, float]]:
        """Return what the policy continues `prompt` with, and start and end of the generation. `on_tokens`: see `RowGenerator`.

        Raises EndpointError for a prompt that leaves no room, RolloutDataFailure for log-probabilities that are not finite.
        """
        ids = prompt.ids
        num_free = self.max_seq_len - len(ids)
        if num_free <= 0:
            self.cut = FinishReason.SEQ_LIMIT.value
            raise bad_request(
                f"This model's maximum context length is {self.max_seq_len} tokens, but the messages have {len(ids)}; shorten them",
                code=CONTEXT_LENGTH,
            )
        if self.recorded:
            now = time.monotonic()
            return self.recorded.popleft(), (now, now)
        # The first continuation of a call has the seed of the sample, as in episodes that run turn by turn; others have one of their own.
        seed = self.seed if not prompt.sibling else sample_seed(self.seed, "branch", prompt.sibling, len(ids))
        start = time.monotonic()
        output = await self.generator.generate_row(
            ids,
            seed=seed,
            stop_strings=list(stop_strings) or None,
            max_new_tokens=max_new_tokens,
            greedy=self.greedy,
            on_tokens=on_tokens,
        )
        if not math.isfinite(sum(output.logprobs)):
            raise RolloutDataFailure(f"log-probabilities must be finite, got {output.logprobs[:8]} ...")
        if not output.ids:
            raise RolloutDataFailure("a generation must have a token, got none; this is a bug of the engine")
        return output, (start, time.monotonic())

    async def generate_all(
        self,
        prompts: Sequence[Prompt],
        record: Callable[[Prompt, GenerationOutput, tuple[float, float]], T],
        *,
        max_new_tokens: int | None,
        stop_strings: Sequence[str],
        on_tokens: Callable[[int, list[int]], None] | None = None,
    ) -> list[T]:
        """Return what `record` makes of the continuation of each prompt; prompts without one are abandoned.

        `on_tokens` gets the index of a prompt and new ids. Raises an ExceptionGroup with what `generate` raises.
        """

        async def one(index: int, prompt: Prompt) -> T:
            report = None if on_tokens is None else partial(on_tokens, index)
            try:
                output, times = await self.generate(
                    prompt, max_new_tokens=max_new_tokens, stop_strings=stop_strings, on_tokens=report
                )
            except BaseException:
                self.session.abandon(prompt)
                raise
            return record(prompt, output, times)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index, prompt)) for index, prompt in enumerate(prompts)]
        return [task.result() for task in tasks]

    def begin_tokens(self, ids: Sequence[int]) -> Prompt:
        """Start a call whose input is `ids`; return that input, spliced to an earlier call of the session that it continues.

        Raises EndpointError when the sample has made `max_calls` calls already.
        """
        self._admit()
        return self.session.begin_tokens(ids)

    def begin(self, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> Prompt:
        """Start a call whose input are chat `messages`; return its token ids, spliced to an earlier call that the messages continue.

        `settings` are the variables of the chat template. Raises EndpointError when the template refuses the messages, and when the sample
        has made `max_calls` calls already.
        """
        self._admit()
        try:
            return self.session.begin(messages, settings)
        except ConfigError as error:
            raise bad_request(str(error)) from error

    def _admit(self) -> None:
        if self._count >= self.max_calls:
            raise EndpointError(
                429,
                "rate_limit_error",
                f"a sample may make {self.max_calls} calls (env.options.maxCalls); end the program sooner or raise it",
                code="too_many_calls",
            )
        self._count += 1

    def enter(self, run: str) -> None:
        """Count the running task as a call of `run`. The first call of a new run empties the session and drops the calls of the old one."""
        if run != self.run:
            if run in self._old_runs:
                raise not_permitted("this run has ended, because the sample was started again", code="session_ended")
            if self.run:
                self._old_runs.append(self.run)
            self._drop_calls()
            self.run, self.cut, self._count = run, None, 0
            self.session = Session(self.session.template)
        if len(self._calls) >= CALLS_AT_ONCE:
            raise EndpointError(
                429,
                "rate_limit_error",
                f"a sample may have {CALLS_AT_ONCE} calls in progress; wait for one",
                code="too_many_calls",
            )
        task = asyncio.current_task()
        assert task is not None, "bug: a call outside of a task"
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    def _drop_calls(self) -> None:
        for task in self._calls:
            task.cancel()
        self._calls.clear()

    def end(self) -> None:
        """Drop the calls in progress; further ones are refused."""
        self.ended = True
        self._drop_calls()


class Episodes:
    """The open sessions by key."""

    def __init__(self, template: ChatTemplate, *, max_seq_len: int, max_calls: int) -> None:
        """Sessions render messages with `template`; a sequence has at most `max_seq_len` tokens, a sample `max_calls` calls."""
        self.template = template
        self.max_seq_len = max_seq_len
        self._max_calls = max_calls
        self._open: dict[str, AgentEpisode] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self.refused = 0
        """Calls without the key of a live session."""

    def open(self, name: str, generator: RowGenerator, *, seed: int, greedy: bool) -> AgentEpisode:
        """Return a new session for the sample `name`."""
        episode = AgentEpisode(
            key=f"rl-{secrets.token_hex(16)}",
            name=name,
            session=Session(self.template),
            generator=generator,
            seed=seed,
            max_seq_len=self.max_seq_len,
            max_calls=self._max_calls,
            greedy=greedy,
        )
        self._open[episode.key] = episode
        return episode

    def close(self, episode: AgentEpisode) -> None:
        """End a session; idempotent."""
        episode.end()
        if self._open.pop(episode.key, None) is not None:
            self._closed[episode.key] = None
            if len(self._closed) > REMEMBERED_KEYS:
                self._closed.popitem(last=False)

    def find(self, authorization: str | None) -> AgentEpisode:
        """Return the session of the header `Authorization: Bearer KEY.RUN`, with the present call counted in it.

        Raises EndpointError with status 401 for an unknown key and for a session that has ended.
        """
        scheme, _, token = (authorization or "").partition(" ")
        key, _, run = token.strip().partition(".")
        episode = self._open.get(key) if scheme.lower() == "bearer" else None
        try:
            if episode is None and key in self._closed:
                raise not_permitted("the session of this API key has ended; its sample is scored", code="session_ended")
            if episode is None:
                raise not_permitted("the API key must be that of a live session, got another", code="invalid_api_key")
            episode.enter(run)
        except EndpointError as error:
            self.refused += error.status == 401
            raise
        return episode


def plain_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the messages of a request as chat templates expect them. Raises EndpointError for what this endpoint cannot read."""
    if not messages:
        raise bad_request("messages must have an entry, got none")
    try:
        return [history.for_template(message) for message in messages]
    except (ValueError, AttributeError) as error:
        raise bad_request(f"messages: {error}") from error
