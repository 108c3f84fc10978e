"""`Session`: the calls of one episode, with the exact tokens of each.

A call continues the deepest earlier call whose messages and reply begin its own messages. Its input is then the ids of that call, prompt and
sampled ones, and the ids of what follows. So the calls of a session are a tree:

    call 1 --- call 2 --- call 3          a conversation that only grows is one line
           \\-- call 4                     another reply to the same messages, or changed messages after call 1, is a branch
    call 5                                a changed history has no earlier call: a branch with a prompt of its own

A path from a root to a leaf is one training sample. Each sampled token is sampled once, in the order of its path, from exactly the ids
before it on its path; a token that several paths share trains in one of them (`branch_samples`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_core.rollouts.chat_template import ChatTemplate
from rl_core.rollouts.endpoint import history
from rl_core.rollouts.rows import GenerationOutput


@dataclass(eq=False, slots=True)
class Turn:
    """One finished call."""

    parent: Turn | None
    """The call that it continues; None = it begins a conversation."""
    prompt: list[int]
    """Ids between those of the parent and the sampled ones."""
    output: GenerationOutput
    text: str
    """The sampled text."""
    messages: Sequence[Mapping[str, Any]] = ()
    """Messages between the parent's reply and the sampled text, as the program sent them; none where the call has token ids."""
    times: tuple[float, float] = (0.0, 0.0)
    """Start and end of the generation, monotonic seconds."""
    children: int = 0

    @property
    def path(self) -> list[Turn]:
        """Return the calls from the root to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    @property
    def ids(self) -> list[int]:
        """Return all ids of the path, prompts and sampled ones."""
        return [token for turn in self.path for token in (*turn.prompt, *turn.output.ids)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """The input of a call."""

    parent: Turn | None
    before: list[int]
    """Ids of the parent's path."""
    added: list[int]
    """Ids that follow them."""
    digest: history.Digest
    """Of the messages."""
    sibling: int
    """Number of calls that continue the same parent and were begun before."""
    messages: Sequence[Mapping[str, Any]] = ()
    """Messages that `added` was made of; none where the call has token ids."""

    @property
    def ids(self) -> list[int]:
        """Return the ids that the model reads."""
        return self.before + self.added


@dataclass(frozen=True, slots=True)
class Branch:
    """A training sample: one conversation of a session, from its first call to its last."""

    turns: list[Turn]
    trains: list[bool]
    """Whether the sampled tokens of each turn train in this sample."""


@dataclass(slots=True)
class Session:
    """The calls of one episode."""

    template: ChatTemplate
    turns: list[Turn] = field(default_factory=list)
    """Finished calls, in the order in which they ended."""
    branches: int = 0
    """Calls that did not continue the only open end of the conversation."""
    unspliced: int = 0
    """Calls that continue an earlier one, but whose ids could not be attached to its ids; each is a branch."""
    _by_digest: dict[history.Digest, Turn] = field(default_factory=dict)
    _begun: dict[int, int] = field(default_factory=dict)
    """Calls that were begun, by the parent's identity; 0 = those without a parent."""

    def begin(self, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> Prompt:
        """Return the input of a call with `messages`, which are those of `history.for_template`.

        Raises ConfigError if the chat template refuses the messages.
        """
        digests = list(history.prefixes(history.root(settings), messages))
        for count in range(len(messages), 0, -1):
            parent = self._by_digest.get(digests[count - 1])
            if parent is None:
                continue
            ids = parent.ids
            added_ids = self.template.after(messages, count, ids[-1], settings)
            if added_ids is not None:
                return self._prompt(parent, ids, added_ids, digests[-1], messages[count:])
            self.unspliced += 1
            break
        return self._prompt(None, [], self.template.whole(messages, settings), digests[-1], messages)

    def begin_tokens(self, ids: Sequence[int]) -> Prompt:
        """Return the input of a call with token ids. It continues the longest earlier call whose ids begin `ids`."""
        all_ids, parent, prefix = list(ids), None, list[int]()
        for turn in self.turns:
            path = turn.ids
            if len(prefix) < len(path) < len(all_ids) and all_ids[: len(path)] == path:
                parent, prefix = turn, path
        digest = history.of_tokens(all_ids)
        return self._prompt(parent, prefix, all_ids[len(prefix) :], digest)

    def _prompt(
        self,
        parent: Turn | None,
        prefix: list[int],
        added_ids: list[int],
        digest: history.Digest,
        messages: Sequence[Mapping[str, Any]] = (),
    ) -> Prompt:
        key = id(parent) if parent is not None else 0
        sibling = self._begun.get(key, 0)
        self._begun[key] = sibling + 1
        self.branches += sibling > 0
        return Prompt(parent=parent, before=prefix, added=added_ids, digest=digest, sibling=sibling, messages=messages)

    def abandon(self, prompt: Prompt) -> None:
        """Forget a call that was begun and got no tokens."""
        self._begun[id(prompt.parent) if prompt.parent is not None else 0] -= 1
        self.branches -= prompt.sibling > 0

    def finish(
        self,
        prompt: Prompt,
        output: GenerationOutput,
        reply: Mapping[str, Any] | None,
        *,
        text: str = "",
        times: tuple[float, float] = (0.0, 0.0),
    ) -> Turn:
        """Record a call that got tokens. `reply` is its message as the client received it (None for a call with token ids)."""
        turn = Turn(
            parent=prompt.parent,
            prompt=prompt.added,
            output=output,
            text=text,
            messages=prompt.messages,
            times=times,
        )
        if prompt.parent is not None:
            prompt.parent.children += 1
        self.turns.append(turn)
        if reply is not None:
            self._by_digest.setdefault(history.extended(prompt.digest, reply), turn)
        return turn

    def lines(self) -> list[list[Turn]]:
        """Return the paths of the session, one per call that no other continues, in the order in which those ended."""
        return [turn.path for turn in self.turns if not turn.children]

    def branch_samples(self) -> list[Branch]:
        """Return the paths with the one that ended last first. A turn of several paths trains in the first of them."""
        trained: set[int] = set()
        samples = []
        for line in reversed(self.lines()):
            samples.append(Branch(line, [id(turn) not in trained for turn in line]))
            trained.update(map(id, line))
        return samples
