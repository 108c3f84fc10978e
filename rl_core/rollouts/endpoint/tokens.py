"""`/v1/completions` and `/inference/v1/generate`: calls whose input is a text or token ids, without a chat template.

A call continues the earlier call of its session whose ids its own ids begin with. Ids are never tokenized again; a text is, so that a client
that continues a conversation should send ids.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from itertools import accumulate
from typing import Any
from uuid import uuid4

from pydantic import ConfigDict, Field

from rl_core.api.records import FinishReason
from rl_core.data.tokenizer import Tokenizer
from rl_core.rollouts.endpoint.chat import Choice, Completed, cut, token_logprobs
from rl_core.rollouts.endpoint.episodes import AgentEpisode
from rl_core.rollouts.endpoint.errors import bad_request
from rl_core.rollouts.endpoint.pieces import DONE, Piece, server_sent
from rl_core.rollouts.endpoint.request import CallRequest
from rl_core.rollouts.endpoint.session import Prompt
from rl_core.rollouts.rows import GenerationOutput


class CompletionRequest(CallRequest):
    """A request of `/v1/completions`."""

    model_config = ConfigDict(strict=True)

    prompt: str | list[int] = Field(min_length=1)
    logprobs: int | None = None
    echo: bool | None = None
    stream_options: dict[str, Any] | None = None

    def check_offered(self) -> None:
        """Check that the endpoint offers what the request asks for. Raises EndpointError."""
        if self.echo:
            raise bad_request("echo must be false here; the prompt is known to the caller")


def as_completion(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a `/inference/v1/generate` call as one of `/v1/completions`."""
    settings = body.get("sampling_params") or {}
    if not isinstance(settings, Mapping):
        raise bad_request("sampling_params must be an object")
    if not isinstance(body.get("token_ids"), list):
        raise bad_request("token_ids must be a list of token ids")
    options = {name: settings[name] for name in ("max_tokens", "stop", "n") if settings.get(name) is not None}
    if body.get("stream"):
        raise bad_request("stream must be false here; stream calls of /v1/completions")
    return {**options, "prompt": body.get("token_ids")}


async def complete(
    request: CompletionRequest,
    episode: AgentEpisode,
    tokenizer: Tokenizer,
    *,
    max_new_tokens: int,
    on_tokens: Callable[[int, list[int]], None] | None = None,
) -> Completed:
    """Return the continuations of the request's prompt, recorded in the session of `episode`.

    `max_new_tokens` is the job's limit of a reply. `on_tokens`: see `chat.complete`. Raises EndpointError for a request that cannot be answered.
    """
    ids = tokenizer(request.prompt)["input_ids"] if isinstance(request.prompt, str) else request.prompt
    prompts = [episode.begin_tokens(ids) for _ in range(request.n)]

    def record(prompt: Prompt, output: GenerationOutput, times: tuple[float, float]) -> Choice:
        text = cut(tokenizer.decode(output.ids, skip_special_tokens=True), request.stops)
        episode.session.finish(prompt, output, None, text=text, times=times)
        reason = "length" if FinishReason(output.finish_reason).truncated else "stop"
        return Choice({"role": "assistant", "content": text}, output, reason)

    limit = min(max_new_tokens, request.max_tokens or max_new_tokens)
    choices = await episode.generate_all(
        prompts, record, max_new_tokens=limit, stop_strings=request.stops, on_tokens=on_tokens
    )
    return Completed(list(ids), choices)


def answer(request: CompletionRequest, completed: Completed, *, model: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the body of an answer of `/v1/completions`."""
    choices = []
    for index, choice in enumerate(completed.choices):
        body: dict[str, Any] = {
            "index": index,
            "text": choice.message["content"],
            "finish_reason": choice.finish_reason,
            "logprobs": None,
        }
        if request.logprobs is not None:
            body["logprobs"] = _logprobs(choice, tokenizer, as_ids=bool(request.return_tokens_as_token_ids))
        if request.return_token_ids:
            body |= {"token_ids": choice.output.ids, "prompt_token_ids": completed.prompt_ids}
        choices.append(body)
    return {**_head(model), "choices": choices, "usage": completed.usage}


async def events(
    request: CompletionRequest, parts: AsyncGenerator[Piece | Completed], *, model: str, tokenizer: Tokenizer
) -> AsyncGenerator[bytes]:
    """Yield the server-sent events of the call `parts`, those of `pieces.pieces`.

    The last chunk of a choice has its finish reason and, if asked for, its log-probabilities and its token ids.
    """
    head = _head(model)
    try:
        async for part in parts:
            if isinstance(part, Piece):
                choice = {"index": part.index, "text": part.text, "finish_reason": None, "logprobs": None}
                yield server_sent({**head, "choices": [choice]})
                continue
            final = answer(request, part, model=model, tokenizer=tokenizer)
            for choice_end in final["choices"]:
                yield server_sent({**head, "choices": [{**choice_end, "text": ""}]})
            if (request.stream_options or {}).get("include_usage"):
                yield server_sent({**head, "choices": [], "usage": final["usage"]})
    finally:
        await parts.aclose()
    yield DONE


def _head(model: str) -> dict[str, Any]:
    return {"id": f"cmpl-{uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": model}


def _logprobs(choice: Choice, tokenizer: Tokenizer, *, as_ids: bool) -> dict[str, Any]:
    entries = token_logprobs(choice.output, tokenizer, as_ids=as_ids)
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": None,
        "text_offset": [0, *accumulate(len(entry["token"]) for entry in entries[:-1])],
    }


def generated(completed: Completed, *, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the body of an answer of `/inference/v1/generate`; its log-probabilities name tokens as `token_id:N`."""
    choices = [
        {
            "index": index,
            "token_ids": choice.output.ids,
            "finish_reason": choice.finish_reason,
            "logprobs": {"content": token_logprobs(choice.output, tokenizer, as_ids=True)},
        }
        for index, choice in enumerate(completed.choices)
    ]
    return {"request_id": uuid4().hex, "choices": choices, "prompt_logprobs": None, "usage": completed.usage}
