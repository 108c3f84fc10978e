"""`ChatTemplate`: token ids of a conversation, and of the part of a conversation that follows sampled tokens.

A model that continues a conversation must read the ids that it sampled, and not the ids that a tokenizer makes of their text. So the
history up to an assistant message is never tokenized again: only what the template writes after that message is.

    whole:   <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n<|im_start|>user\\nBye<|im_end|>\\n...
                                                                  ^ sampled        ^ `after`
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl_core.api.errors import ConfigError
from rl_core.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rl_core.api.job import RLJobSpec

SENTINEL = "\ue000rljob\ue001"
"""Stands for an assistant message in a rendered conversation: characters of private use, which no template changes or strips."""


class ChatTemplate:
    """Renders and tokenizes conversations."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: Collection[int], *, template: str | None = None) -> None:
        """Use `template`, None = the tokenizer's own; `stop_ids` are the token ids that end a generation."""
        self._tokenizer = tokenizer
        self._template = template
        self._stop_texts = {token: tokenizer.decode([token]) for token in sorted(stop_ids)}

    @classmethod
    def of_job(cls, spec: RLJobSpec, tokenizer: Tokenizer, *, stop_ids: Collection[int]) -> ChatTemplate:
        """Return the chat template of a job; `stop_ids` end a generation besides the tokenizer's eos token."""
        stop_token_ids = {tokenizer.eos_token_id, *stop_ids, *spec.rollout.sampling.stop_token_ids}
        return cls(tokenizer, stop_token_ids, template=spec.data.chat_template)

    @property
    def present(self) -> bool:
        """Whether there is a chat template."""
        return bool(self._template or self._tokenizer.chat_template)

    def whole(self, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> list[int]:
        """Return the ids of a conversation and of the generation prompt. Raises ConfigError if the template refuses it."""
        return self._ids(self._render(messages, settings))

    def after(
        self, messages: Sequence[Mapping[str, Any]], count: int, last: int, settings: Mapping[str, Any]
    ) -> list[int] | None:
        """Return the ids that follow the sampled tokens of `messages[count - 1]`, an assistant message, in the conversation.

        They are the rest of the message's turn, then the messages after it and the generation prompt. `last` is the last sampled id, -1 if
        nothing was sampled. If `last` ends a generation and the template writes it at this place, it is not returned again. Returns None if
        the template refuses the messages or does not write the content of the assistant message.
        """
        message = messages[count - 1]
        tail = (
            self._tail(messages, count, {"role": "assistant", "content": SENTINEL}, settings)
            if not message.get("tool_calls")
            else None
        )
        if message.get("tool_calls"):
            tail = self._tail_after_calls(messages, count, settings)
        if tail is None:
            return None
        stop_text = self._stop_texts.get(last)
        return self._ids(tail[len(stop_text) :] if stop_text and tail.startswith(stop_text) else tail)

    def _tail_after_calls(
        self, messages: Sequence[Mapping[str, Any]], count: int, settings: Mapping[str, Any]
    ) -> str | None:
        """Return the text that follows an assistant message with tool calls.

        The template must see that there are calls, since some write the results of tools by them. What it writes after the last call belongs to
        the turn up to the end-of-turn token; without such a token, the message is rendered without its calls.
        """
        message = messages[count - 1]
        calls = [
            {**call, "function": {"name": call["function"]["name"], "arguments": {SENTINEL: SENTINEL}}}
            for call in message["tool_calls"]
        ]
        tail = self._tail(messages, count, {"role": "assistant", "content": "", "tool_calls": calls}, settings)
        positions = [
            position
            for text in self._stop_texts.values()
            if text and tail is not None and (position := tail.find(text)) >= 0
        ]
        if tail is not None and positions:
            return tail[min(positions) :]
        return self._tail(messages, count, {"role": "assistant", "content": SENTINEL}, settings)

    def _tail(
        self,
        messages: Sequence[Mapping[str, Any]],
        count: int,
        stand_in: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> str | None:
        """Return what the template writes after the last sentinel of `stand_in`, in the place of `messages[count - 1]`."""
        try:
            text = self._render([*messages[: count - 1], stand_in, *messages[count:]], settings)
        except ConfigError:
            return None
        _, separator, tail = text.rpartition(SENTINEL)
        return tail if separator else None

    def _render(self, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, template=self._template, variables=settings
        )

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
