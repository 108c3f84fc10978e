"""The record of a model call: the token ids, log-probabilities and versions that were sampled, sent to the env worker that forwarded the call.

The env worker keeps the requests and records of a session. When the rollout is lost, it sends them again to the rollout that goes on with the
episode: each request with its record, so that the same tokens are entered into a session there and none is generated.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

from aiohttp import web

from rl_core.messages.agents import RECORD
from rl_core.rollouts.endpoint.chat import Completed
from rl_core.rollouts.endpoint.errors import bad_request
from rl_core.rollouts.endpoint.pieces import Piece
from rl_core.rollouts.rows import GenerationOutput

NOTHING = b"[]"
"""The record of a call that got no tokens."""


def record_of(completed: Completed) -> bytes:
    """Return the record of a finished call."""
    outputs = [choice.output for choice in completed.choices]
    return json.dumps(
        [[output.ids, output.logprobs, output.finish_reason, output.versions, output.worker] for output in outputs]
    ).encode()


def asked(request: web.Request) -> bool:
    """Return whether the caller wants the record of the call."""
    return RECORD in request.headers and not request.headers[RECORD].isdigit()


def split(request: web.Request, body: bytes) -> tuple[bytes, list[GenerationOutput] | None]:
    """Return the body of a request and what the record behind it says; None = the call is to be generated. Raises EndpointError."""
    length = request.headers.get(RECORD, "")
    if not length.isdigit():
        return body, None
    try:
        entries = json.loads(body[int(length) :])
        return body[: int(length)], [
            GenerationOutput(
                ids=ids,
                logprobs=logprobs,
                finish_reason=reason,
                versions=[tuple(span) for span in versions],
                worker=worker,
            )
            for ids, logprobs, reason, versions, worker in entries
        ]
    except (TypeError, ValueError) as error:
        raise bad_request(f"{RECORD}: the record must be a list of outputs: {error}") from error


def answer(request: web.Request, body: bytes, record: bytes, *, status: int = 200) -> web.Response:
    """Return the answer `body`, JSON, with `record` behind it if the caller asked for it."""
    headers = {RECORD: str(len(body))} if asked(request) else None
    return web.Response(
        body=body + record if headers else body,
        status=status,
        headers=headers,
        content_type="application/json",
        charset="utf-8",
    )


async def noted(parts: AsyncGenerator[Piece | Completed], records: list[bytes]) -> AsyncGenerator[Piece | Completed]:
    """Yield the `parts` of a streamed call; the record of the finished call is added to `records` before it is yielded."""
    try:
        async for part in parts:
            if isinstance(part, Completed):
                records.append(record_of(part))
            yield part
    finally:
        await parts.aclose()
