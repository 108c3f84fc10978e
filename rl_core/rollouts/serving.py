"""`serve`: the endpoint of rollouts over a model folder, without a job. `rljob serve` runs it.

Programs see what they see in training: the same paths, chat template and sampling settings. Each call is a session of its own, so that
nothing is kept and earlier replies are tokenized again. Any API key is accepted.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from rl_core.api.backends import ENGINES
from rl_core.api.user_code import import_reference
from rl_core.messages.agents import MODEL_NAME
from rl_core.rollouts.chat_template import ChatTemplate
from rl_core.rollouts.endpoint.episodes import AgentEpisode, Episodes
from rl_core.rollouts.endpoint.server import Endpoint
from rl_core.rollouts.endpoint.session import Session
from rl_core.rollouts.generation import RowGenerator
from rl_core.rollouts.groups import training_params
from rl_core.rollouts.model_files import generation_eos_ids, max_positions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from torch import Tensor

    from rl_core.api.job import RLJobSpec
    from rl_core.data.tokenizer import Tokenizer

VERSION = 0
"""Policy version of the served weights."""
MOST_CHOICES = 4096
"""Largest number of continuations of one request."""


class OpenEpisodes(Episodes):
    """Sessions of one call each, for any API key or none."""

    def __init__(self, template: ChatTemplate, generator: RowGenerator, *, max_seq_len: int) -> None:
        """Sample with `generator`; the others are those of `Episodes`."""
        super().__init__(template, max_seq_len=max_seq_len, max_calls=MOST_CHOICES)
        self._generator = generator

    def find(self, authorization: str | None) -> AgentEpisode:
        """Return a new session, with a new seed, for any key. The session is not stored."""
        return AgentEpisode(
            key="",
            name="served",
            session=Session(self.template),
            generator=self._generator,
            seed=secrets.randbits(63),
            max_seq_len=self.max_seq_len,
            max_calls=MOST_CHOICES,
        )


@asynccontextmanager
async def serve(
    spec: RLJobSpec,
    files: Mapping[str, bytes],
    tokenizer: Tokenizer,
    tensors: Callable[[Mapping[str, tuple[tuple[int, ...], str]]], Iterator[tuple[str, Tensor]]],
    on_stage: Callable[[str], object],
    *,
    device: str,
    host: str,
    port: int,
) -> AsyncIterator[str]:
    """Serve a model with the engine and settings of `spec` while the block runs; yield the base URL.

    `files` are the model folder's configuration files by name. `tensors` gets name -> (shape, dtype) of what the engine needs, and yields the
    tensors. `on_stage` is called with what the start of an engine process does. Without a chat template, calls with messages are refused.
    Raises ConfigError for what the engine cannot run, OSError for a port that is taken.
    """
    template = ChatTemplate.of_job(spec, tokenizer, stop_ids=generation_eos_ids(files))
    build = import_reference(ENGINES[spec.rollout.engine], field="rollout.engine").build_engine
    limit = spec.rollout.max_sequence_length or max_positions(files)
    engine: Any = await asyncio.to_thread(build, spec, files, device, limit, lambda tokens: None, on_stage)
    try:
        target = engine.weight_target
        await target.prepare(spec.runtime.deadlines.wait_ready)
        await asyncio.to_thread(target.load, tensors(target.names_and_shapes()), VERSION)
        await target.resume(VERSION, "")
        episodes = OpenEpisodes(template, engine.generator(training_params(spec)), max_seq_len=engine.max_seq_len)
        endpoint = Endpoint(episodes, tokenizer, model=MODEL_NAME, max_new_tokens=spec.rollout.sampling.max_new_tokens)
        try:
            await endpoint.start(host, port)
            yield f"http://{host}:{endpoint.port}/v1"
        finally:
            await endpoint.close()
    finally:
        await asyncio.to_thread(engine.close)
