"""Conversations with an environment: the policy reads what the chat template makes of them, and its own tokens as it sampled them."""

from dataclasses import replace

import pytest

from rl_core.api.errors import RolloutConfigError
from rl_core.api.records import EnvironmentInterface, EnvironmentReturn
from rl_core.rollouts.base import token_loss_mask
from rl_core.rollouts.chat_template import ChatTemplate
from rl_core.rollouts.multi_turn import AsyncRolloutImpl
from tests.unit.endpoint.conftest import TEMPLATES, SampledText, make_tokenizer

QUESTION = [{"role": "system", "content": "Guess."}, {"role": "user", "content": "which number?"}]


class Hints(EnvironmentInterface):
    """Says the next of its hints, and ends the episode after the last one."""

    def __init__(self, *hints, role="user"):
        self.hints, self.role = hints, role

    def step(self, message_log_batch, metadata_batch):
        turns = [sum(message["role"] == "assistant" for message in log) for log in message_log_batch]
        texts = [self.hints[turn - 1] if turn <= len(self.hints) else "" for turn in turns]
        over = [turn > len(self.hints) for turn in turns]
        observations = [{"role": self.role, "content": text} for text in texts]
        return EnvironmentReturn(observations, [None] * len(turns), None, [1.0] * len(turns), over, None)


class StopsAtStrings(SampledText):
    """A policy whose generations end before the token that ends a message."""

    async def generate_row(self, prompt, **options):
        output = await super().generate_row(prompt, **options)
        start, end, version = output.versions[-1]
        return replace(
            output,
            ids=output.ids[:-1],
            logprobs=output.logprobs[:-1],
            versions=[*output.versions[:-1], (start, end - 1, version)],
        )


async def episode(tokenizer, environment, *, texts=("one", "two", "three"), chat=True, length=4096, policy=SampledText):
    """Return the messages of one episode whose policy says `texts` in turn, and what it read before each."""
    ids = ChatTemplate(tokenizer, {1, 3}).whole(QUESTION, {})
    said = iter(texts)
    policy = policy(tokenizer, lambda prompt, seed: next(said))
    impl = AsyncRolloutImpl(
        tokenizer, {"task": environment}, 1, length, policy, chat_template=ChatTemplate(tokenizer, {1, 3})
    )
    log = [*QUESTION[:-1], {**QUESTION[-1], "token_ids": ids}]
    log[0] = {**log[0], "token_ids": []}
    prompt = {"message_log": log, "length": len(ids), "extra_env_info": {}, "loss_multiplier": 1.0, "idx": 0}
    record = await impl.run_rollout({**prompt, "task_name": "task", "group_id": "0-0", "chat": chat})
    return record.completions[0], [read for read, *_ in policy.calls]


@pytest.mark.parametrize("template", ["chatml", "strips", "tools"])
async def test_each_turn_reads_the_conversation_as_the_template_renders_it(template):
    """The templates end each message with the token that ends a generation, so what was sampled is what they write."""
    tokenizer = make_tokenizer(TEMPLATES[template])
    completion, read = await episode(tokenizer, Hints("higher", "lower"))
    whole = list(QUESTION)
    for ids, said, hint in zip(read, ("one", "two", "three"), ("higher", "lower", None), strict=True):
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(whole, add_generation_prompt=True)
        whole += [{"role": "assistant", "content": said}, {"role": "user", "content": hint}]
    sampled = sum(len(text) + 1 for text in ("one", "two", "three"))
    assert token_loss_mask(completion.message_log).sum() == sampled
    assert [message["content"] for message in completion.message_log if message["role"] == "user"][1:-1] == [
        "higher",
        "lower",
    ]


async def test_a_turn_that_ended_at_a_stop_string_is_completed(chatml):
    """The model has not sampled the token that ends its message then. It is added, and does not train."""
    completion, read = await episode(chatml, Hints("higher"), texts=("one", "two"), policy=StopsAtStrings)
    whole = [*QUESTION, {"role": "assistant", "content": "one"}, {"role": "user", "content": "higher"}]
    assert chatml.decode(read[1]) == chatml.apply_chat_template(whole, add_generation_prompt=True)
    assert token_loss_mask(completion.message_log).sum() == len("onetwo")


@pytest.mark.parametrize(("role", "chat"), [("environment", True), ("user", False)])
async def test_text_stays_text_for_the_role_environment_and_outside_of_conversations(chatml, role, chat):
    _, read = await episode(chatml, Hints("higher", role=role), texts=("one", "two"), chat=chat)
    assert chatml.decode(read[1][len(read[0]) :]) == "one<|im_end|>higher"


async def test_the_last_observation_is_text_because_nobody_answers_it(chatml):
    completion, _ = await episode(chatml, Hints(), texts=("one",))
    assert len(completion.message_log[-1]["token_ids"]) == 0


async def test_a_long_observation_is_cut_at_the_sequence_limit(chatml):
    completion, read = await episode(chatml, Hints("x" * 10_000), texts=("one", "two"), length=200)
    assert (len(read), completion.finish_reason) == (1, "seq_limit")
    assert sum(len(message["token_ids"]) for message in completion.message_log) == 200


async def test_a_template_that_refuses_the_role_is_told_with_the_way_out():
    refuses = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.content }}{% endfor %}"
    with pytest.raises(RolloutConfigError, match="role tool .* return another role"):
        await episode(make_tokenizer(refuses), Hints("higher", role="tool"))
