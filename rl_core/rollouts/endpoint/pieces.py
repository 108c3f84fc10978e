"""A call as a stream: the text of its replies in pieces while they are generated, then the finished call.

A piece holds text that no later token can change. Held back are incomplete characters, text that could be the beginning of a stop string
or of a tool call, and tool calls, which are read from the whole text.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.data.tokenizer import Tokenizer
from rl_core.rollouts.endpoint.chat import Completed
from rl_core.rollouts.endpoint.request import CallRequest
from rl_core.rollouts.endpoint.tool_calls import TAG

logger = logging.getLogger(__name__)
REPLACEMENT = "\ufffd"
"""The character that tokenizers decode incomplete UTF-8 to."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one reply."""

    index: int
    """Of the choice."""
    text: str
    ids: list[int]
    """Token ids that the reply gained since its last piece. The text of an incomplete character comes with a later piece."""


class TextStream:
    """The text of one reply while it is generated."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], *, tools: bool) -> None:
        """`stops` end the text; `tools`: tool calls may follow the text."""
        self._tokenizer = tokenizer
        self._stops = stops
        self._tools = tools
        self._text = ""
        self._num_sent = 0
        self._ids: list[int] = []
        self._window = self._decoded = 0
        """Ids from `_window` on are decoded together with new ones, since the text of a token may depend on those before it. The text of
        the ids before `_decoded` is in `_text`."""
        self._pending: list[int] = []

    def push(self, ids: list[int]) -> tuple[str, list[int]]:
        """Add token ids. Returns the new text that further ids cannot change, and the ids since text was last returned."""
        self._ids += ids
        self._pending += ids
        window_text = self._decode(self._ids[self._window : self._decoded])
        text = self._decode(self._ids[self._window :])
        if not text.endswith(REPLACEMENT):
            self._text += text[len(window_text) :]
            self._window, self._decoded = self._decoded, len(self._ids)
        end = self._certain()
        if end <= self._num_sent:
            return "", []
        new, self._num_sent = self._text[self._num_sent : end], end
        pending, self._pending = self._pending, []
        return new, pending

    def rest(self, content: str, ids: list[int]) -> tuple[str, list[int]]:
        """Return the remaining text and ids of the finished reply, which has the text `content` and the token ids `ids`."""
        missing = self._pending + ids[len(self._ids) :]
        if content.startswith(self._text[: self._num_sent]):
            return content[self._num_sent :], missing
        logger.warning("a streamed reply differs from its text; a call that continues it is a branch")
        return "", missing

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _certain(self) -> int:
        text = self._text
        positions = [len(text), *(at for stop in self._stops if (at := text.find(stop)) >= 0)]
        positions += [len(text) - overlap(text, stop) for stop in self._stops]
        if self._tools:
            if not text.strip() or text.lstrip().startswith("{"):
                return 0
            at = text.find(TAG)
            positions.append(at if at >= 0 else len(text) - overlap(text, TAG))
        return min(positions)


def overlap(text: str, word: str) -> int:
    """Return the length of the longest beginning of `word`, shorter than `word`, that `text` ends with."""
    return next((size for size in range(len(word) - 1, 0, -1) if text.endswith(word[:size])), 0)


async def pieces(
    request: CallRequest, complete: Callable[..., Coroutine[Any, Any, Completed]], tokenizer: Tokenizer, *, tools: bool
) -> AsyncGenerator[Piece | Completed]:
    """Yield the pieces of the replies to `request`, then the finished call. Closing the generator drops the call.

    `complete(on_tokens=...)` runs the call; `tools`: its replies may contain tool calls. An engine that does not report tokens while it
    generates gives one piece per reply. Raises what `complete` raises.
    """
    streams = [TextStream(tokenizer, request.stops, tools=tools) for _ in range(request.n)]
    queue: asyncio.Queue[Piece | None] = asyncio.Queue()

    def on_tokens(index: int, ids: list[int]) -> None:
        text, new = streams[index].push(ids)
        if text:
            queue.put_nowait(Piece(index, text, new))

    call = asyncio.ensure_future(complete(on_tokens=on_tokens))
    call.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (piece := await queue.get()) is not None:
            yield piece
        completed = call.result()
        for index, (stream, choice) in enumerate(zip(streams, completed.choices, strict=True)):
            text, ids = stream.rest(choice.message["content"] or "", choice.output.ids)
            if text or ids:
                yield Piece(index, text, ids)
        yield completed
    finally:
        if not call.done():
            call.cancel()
            await asyncio.wait([call])


def server_sent(data: dict[str, Any] | str, *, event: str | None = None) -> bytes:
    """Return `data` as a server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    event_line = f"event: {event}\n" if event else ""
    return f"{event_line}data: {text}\n\n".encode("utf-8", "replace")


DONE = server_sent("[DONE]")
"""The last event of a stream of the APIs of OpenAI."""
