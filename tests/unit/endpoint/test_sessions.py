"""Over random sessions and several chat templates: every token that could train was sampled, in order, and stands behind what was read."""

import random

import pytest

from rl_core.rollouts.endpoint import history
from rl_core.rollouts.endpoint.chat import ChatRequest, complete
from rl_core.rollouts.endpoint.session import Session
from tests.unit.endpoint.conftest import TEMPLATES, SampledText, make_episodes, make_tokenizer

TEXTS = [
    "yes",
    "  padded \n",
    "<think>\nhm\n</think>\n\nanswer",
    "cut...",
    "",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "two"}}\n</tool_call>',
    'first\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "sub", "arguments": {"x": [1]}}\n</tool_call>',
    "<tool_call>\nnot json\n</tool_call>",
    "line\n\nline\t",
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
WORDS = ["hi", " lead", "trail ", "two\n\nlines", "x" * 30, "", "<think>no</think>"]


async def converse(rng, episode, tokenizer):
    """Run one random session as a client would; clients drop fields, strip text, retry, summarise and forget."""
    messages = [{"role": "system", "content": rng.choice(WORDS)}] if rng.random() < 0.5 else []
    messages.append({"role": "user", "content": rng.choice(WORDS)})
    tools = TOOLS if rng.random() < 0.5 else None
    for _ in range(rng.randint(1, 6)):
        request = ChatRequest.read({"messages": messages, "tools": tools, "n": rng.choice([1, 1, 1, 2])})
        completed = await complete(request, episode, tokenizer, max_new_tokens=200)
        reply = dict(rng.choice(completed.choices).message)
        kind = rng.random()
        if kind < 0.1:
            continue  # a retry with the same messages
        if kind < 0.2:
            messages = [{"role": "user", "content": f"summary: {len(messages)}"}]
            continue
        if kind < 0.3 and reply["content"]:
            reply["content"] = reply["content"].strip()
        if kind < 0.35 and reply["content"]:
            reply["content"] += "!"  # a client that edits the history
        messages = [*messages, {**reply, "refusal": None, "annotations": []}]
        for call in reply.get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": rng.choice(WORDS)})
        if not reply.get("tool_calls"):
            messages.append({"role": "user", "content": [{"type": "text", "text": rng.choice(WORDS)}]})


def check_exact(session, policy):
    """Each line is what the policy read and sampled, in the order of its calls; every sampled token is in exactly one turn."""
    assert sorted(id(turn) for turn in {id(t): t for line in session.lines() for t in line}.values()) == sorted(
        map(id, session.turns)
    )
    for line in session.lines():
        ids = []
        for turn in line:
            ids += turn.prompt
            read = [call for call in policy.calls if call[0] == ids and call[1] == turn.output.ids]
            assert read, "a turn holds what no call of the policy read and sampled"
            assert (turn.output.logprobs, turn.output.versions) in [(call[2], call[3]) for call in read]
            ids += turn.output.ids
    assert len(session.turns) == len(policy.calls)


@pytest.mark.parametrize("name", TEMPLATES)
async def test_every_recorded_token_was_sampled_from_what_stands_before_it(name):
    tokenizer = make_tokenizer(TEMPLATES[name])
    episodes = make_episodes(tokenizer)
    for seed in range(200):
        policy = SampledText(tokenizer, TEXTS, seed=seed)
        episode = episodes.open("s", policy, seed=seed, greedy=False)
        await converse(random.Random(seed), episode, tokenizer)
        check_exact(episode.session, policy)
        assert episode.session.unspliced == 0
        assert len(episode.session.lines()) == 1 + episode.session.branches


@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_conversation_that_only_grows_is_one_line(name):
    tokenizer = make_tokenizer(TEMPLATES[name])
    for seed in range(100):
        rng, policy = random.Random(seed), SampledText(tokenizer, TEXTS, seed=seed)
        episode = make_episodes(tokenizer).open("s", policy, seed=seed, greedy=False)
        messages = [{"role": "user", "content": rng.choice(WORDS)}]
        for _ in range(4):
            request = ChatRequest.read({"messages": messages, "tools": TOOLS})
            [choice] = (await complete(request, episode, tokenizer, max_new_tokens=200)).choices
            messages = [*messages, choice.message, {"role": "user", "content": rng.choice(WORDS)}]
        assert [len(line) for line in episode.session.lines()] == [4]
        assert episode.session.branches == episode.session.unspliced == 0
        check_exact(episode.session, policy)


async def test_what_is_read_is_what_the_template_writes_where_text_and_tokens_agree():
    """The independent truth: with a character tokenizer and a template that keeps text as it is, splicing must change nothing."""
    tokenizer = make_tokenizer(TEMPLATES["tools"])
    for seed in range(100):
        rng, policy = random.Random(seed), SampledText(tokenizer, ["yes", "line\n\nline", "a b"], seed=seed)
        episode = make_episodes(tokenizer).open("s", policy, seed=seed, greedy=False)
        messages = [{"role": "user", "content": rng.choice(WORDS)}]
        for _ in range(4):
            [choice] = (
                await complete(ChatRequest.read({"messages": messages}), episode, tokenizer, max_new_tokens=200)
            ).choices
            whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            assert policy.calls[-1][0] == tokenizer(whole, add_special_tokens=False)["input_ids"]
            messages = [*messages, choice.message, {"role": "user", "content": rng.choice(WORDS)}]


def test_thinking_that_the_template_strips_from_the_history_stays_in_the_tokens():
    tokenizer = make_tokenizer(TEMPLATES["thinking"])
    episode = make_episodes(tokenizer).open("s", None, seed=0, greedy=False)
    session: Session = episode.session
    first = [{"role": "user", "content": "a"}]
    prompt = session.begin(first, {})
    reply = {"role": "assistant", "content": "hm\n</think>\n\nb"}
    ids = tokenizer("hm\n</think>\n\nb", add_special_tokens=False)["input_ids"] + [3]
    from rl_core.rollouts.rows import GenerationOutput

    output = GenerationOutput(ids=ids, logprobs=[-1.0] * len(ids), finish_reason="stop", versions=[(0, len(ids), 0)])
    session.finish(prompt, output, history.for_template(reply))
    following = session.begin([*first, reply, {"role": "user", "content": "c"}], {})
    assert following.before == prompt.ids + ids
    text = tokenizer.decode(following.added)
    assert text == "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n<think>\n"
