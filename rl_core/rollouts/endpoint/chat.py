"""`/v1/chat/completions`: reads a request, generates its choices and writes the answer.

Sampling is the job's: a temperature, nucleus or penalty of the request is not applied, because the trainer scores tokens with the settings of
the job. A request chooses its messages, tools, length and stop strings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from pydantic import Field

from rl_core.api.records import FinishReason
from rl_core.data.tokenizer import Tokenizer
from rl_core.rollouts.endpoint import history
from rl_core.rollouts.endpoint.episodes import AgentEpisode, plain_messages
from rl_core.rollouts.endpoint.errors import bad_request
from rl_core.rollouts.endpoint.request import CallRequest
from rl_core.rollouts.endpoint.session import Prompt, Session
from rl_core.rollouts.endpoint.tool_calls import read_tool_calls
from rl_core.rollouts.rows import GenerationOutput


class ChatRequest(CallRequest):
    """A request of `/v1/chat/completions`."""

    messages: list[Any] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check_offered(self) -> None:
        """Check that the endpoint offers what the request asks for. Raises EndpointError."""
        if self.top_logprobs:
            raise bad_request(
                f"top_logprobs must be 0, got {self.top_logprobs}: only sampled tokens have log-probabilities here"
            )
        if self.response_format not in (None, {"type": "text"}):
            raise bad_request(
                "response_format must be text: constrained generation would change the distribution that is trained"
            )

    @property
    def limit(self) -> int | None:
        """Return the most tokens of a reply, None = no limit of the request."""
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools that the template renders, None if the request has none or switches them off."""
        return (self.tools or None) if self.tool_choice != "none" else None

    @property
    def settings(self) -> dict[str, Any]:
        """Return the variables of the chat template."""
        return {**(self.chat_template_kwargs or {}), "tools": self.offered_tools}


@dataclass(frozen=True, slots=True)
class Choice:
    """One reply."""

    message: dict[str, Any]
    output: GenerationOutput
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""


@dataclass(frozen=True, slots=True)
class Completed:
    """A call with its replies."""

    prompt_ids: list[int]
    choices: list[Choice]

    @property
    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens, as the API names them."""
        num_prompt, num_generated = len(self.prompt_ids), sum(len(choice.output.ids) for choice in self.choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
        }


async def complete(
    request: ChatRequest,
    episode: AgentEpisode,
    tokenizer: Tokenizer,
    *,
    max_new_tokens: int,
    on_tokens: Callable[[int, list[int]], None] | None = None,
) -> Completed:
    """Return the replies to `request`, recorded in the session of `episode`.

    `max_new_tokens` is the job's limit of a reply. `on_tokens` gets the index of a choice and its new ids, if the engine reports them while
    the row runs. Raises EndpointError for a request that cannot be answered.
    """
    messages, session = plain_messages(request.messages), episode.session
    settings = request.settings
    prompts = [episode.begin(messages, settings) for _ in range(request.n)]
    limit = min(max_new_tokens, request.limit or max_new_tokens)

    choices = await episode.generate_all(
        prompts,
        lambda prompt, output, times: _record(request, session, prompt, output, times, tokenizer),
        max_new_tokens=limit,
        stop_strings=request.stops,
        on_tokens=on_tokens,
    )
    return Completed(prompts[0].ids, choices)


def _record(
    request: ChatRequest,
    session: Session,
    prompt: Prompt,
    output: GenerationOutput,
    times: tuple[float, float],
    tokenizer: Tokenizer,
) -> Choice:
    text = cut(tokenizer.decode(output.ids, skip_special_tokens=True), request.stops)
    content, calls = read_tool_calls(text) if request.offered_tools else (text, [])
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if calls:
        message["tool_calls"] = calls
    session.finish(prompt, output, history.for_template(message), text=text, times=times)
    truncated = FinishReason(output.finish_reason).truncated
    return Choice(message, output, "length" if truncated else "tool_calls" if calls else "stop")


def cut(text: str, stops: Sequence[str]) -> str:
    """Return `text` before the first stop string; the API leaves stop strings out."""
    return text[: min((position for stop in stops if (position := text.find(stop)) >= 0), default=len(text))]


def answer(request: ChatRequest, completed: Completed, *, model: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the body of the answer."""
    body: dict[str, Any] = {
        "id": f"chatcmpl-{uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(request, index, choice, tokenizer) for index, choice in enumerate(completed.choices)],
        "usage": completed.usage,
    }
    if request.return_token_ids:
        body["prompt_token_ids"] = completed.prompt_ids
    return body


def _choice(request: ChatRequest, index: int, choice: Choice, tokenizer: Tokenizer) -> dict[str, Any]:
    body: dict[str, Any] = {
        "index": index,
        "message": choice.message,
        "finish_reason": choice.finish_reason,
        "logprobs": None,
    }
    if request.logprobs:
        body["logprobs"] = {
            "content": token_logprobs(choice.output, tokenizer, as_ids=bool(request.return_tokens_as_token_ids))
        }
    if request.return_token_ids:
        body["token_ids"] = choice.output.ids
    return body


def token_logprobs(output: GenerationOutput, tokenizer: Tokenizer, *, as_ids: bool) -> list[Mapping[str, Any]]:
    """Return the entries `logprobs.content` of the sampled tokens; `as_ids` names tokens as `token_id:N`."""
    entries: list[Mapping[str, Any]] = []
    for token, logprob in zip(output.ids, output.logprobs, strict=True):
        text = f"token_id:{token}" if as_ids else tokenizer.decode([token])
        entries.append(
            {"token": text, "logprob": logprob, "bytes": None if as_ids else list(text.encode()), "top_logprobs": []}
        )
    return entries
