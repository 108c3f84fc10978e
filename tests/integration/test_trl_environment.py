"""A TRL environment class gives in `env.type: environment_factory` what it gives in the installed TRL's GRPOTrainer.

Both sides read the same script: a policy whose reply is a function of the ids that it reads. TRL's trainer renders, parses, runs tools and
scores with its own code; only its generation is replaced. Ours runs the class against the endpoint. Compared are every id of prompt and
completion, which ids are trained, the calls that the class saw, and the rewards.
"""

import hashlib
import random
import sys
import types
import warnings

import pytest
import torch
from tokenizers import Tokenizer as Backend

from rl_core.data.tokenizer import Tokenizer
from rl_core.envs.environment_factory import EnvironmentFactory
from rl_core.rollouts.agents import AgentRolloutImpl
from rl_core.rollouts.endpoint.server import Endpoint
from tests.unit.endpoint.conftest import SampledText, make_episodes, make_tokenizer

EOS = 3
ROWS = [
    {"prompt": [{"role": "user", "content": f"Guess my number. {hint}"}], "secret": secret, "kind": kind}
    for secret, (hint, kind) in enumerate([("", "text"), ("It is odd.", "silent"), ("Ask first!", "text")] * 4)
]
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
GUESS = CALL % ("guess", '{"number": %d}')


class Guessing:
    """An environment as TRL's documentation shows them."""

    seen = []

    def __init__(self):
        self.secret, self.guesses = None, 0

    def reset(self, secret, kind, **columns):
        self.secret, self.guesses, self.journal = secret, 0, [("reset", secret, sorted(columns))]
        Guessing.seen.append(self.journal)
        return None if kind == "silent" else f"\nIt is below {secret + 3}."

    def guess(self, number: int, loudly: bool = False) -> str:
        """
        Guess the number.

        Args:
            number: The number to try.
            loudly: Whether to shout.

        Returns:
            What is wrong with it.
        """
        self.journal.append(("guess", number, loudly))
        self.guesses += 1
        if number > 90:
            raise ValueError(f"{number} is out of bounds")
        return "right" if number == self.secret else {"low": number < self.secret}

    async def hint(self, words: list[str]) -> str:
        """
        Ask for a hint.

        Args:
            words: What the hint should have (choices: ["small", "large"]).
        """
        self.journal.append(("hint", words))
        if not words:
            raise KeyError("words")
        return " ".join(words)

    def _private(self):
        raise AssertionError("never a tool")

    @property
    def broken(self):
        raise AssertionError("never read")

    def get_reward(self) -> float:
        self.journal.append(("reward",))
        return 1.0 / (1 + self.guesses) + self.secret


def script(ids):
    """Reply to the input `ids`: calls of all sorts for up to four replies, and a text at the end."""
    chance = random.Random(hashlib.blake2b(repr(ids).encode()).digest())
    if ids.count(EOS) > 12:
        return "I give up."
    number = chance.randint(0, 99)
    return chance.choice(
        [
            GUESS % number,
            "Let me try. " + GUESS % number + "\n" + CALL % ("guess", '{"number": 7, "loudly": true}'),
            CALL % ("hint", '{"words": ["small", "odd"]}') + "\n" + GUESS % number,
            CALL % ("hint", '{"words": []}'),
            CALL % ("nothing", "{}"),
            CALL % ("guess", '{"numbre": 3}'),
            '<tool_call>\n{"name": "guess", "arguments": {"number"\n</tool_call>',
            f"It is {number}.",
        ]
    )


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import Dataset
        from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
        from trl import GRPOConfig, GRPOTrainer
        from trl.chat_template_utils import add_response_schema, qwen2_5_chat_template

        class Scripted(GRPOTrainer):
            def _generate_single_turn(self, prompt_ids, *arguments, **options):
                texts = [script(list(ids)) for ids in prompt_ids]
                return [self.processing_class(text)["input_ids"] + [EOS] for text in texts], None

            def _generate(self, prompts):
                self.generated = super()._generate(prompts)
                return self.generated

            def _calculate_rewards(self, *arguments):
                self.rewards = super()._calculate_rewards(*arguments)
                return self.rewards

        backend = make_tokenizer(None).backend
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Backend.from_str(backend.to_str()),
            pad_token="<pad>",
            eos_token="<|im_end|>",
            padding_side="left",
            chat_template=qwen2_5_chat_template,
        )
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=len(tokenizer),
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=1,
                num_key_value_heads=1,
                max_position_embeddings=8192,
            )
        )
        arguments = GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=len(ROWS),
            num_generations=2,
            max_completion_length=4096,
            beta=0.0,
            report_to="none",
        )
        built = Scripted(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_list(ROWS),
            processing_class=add_response_schema(tokenizer),
            environment_factory=Guessing,
        )
        built.model.train()
        return built


def sides(ids, trained):
    return [(token, bool(mask)) for token, mask in zip(ids, trained, strict=True)]


async def test_the_same_class_gives_the_same_prompts_calls_and_rewards(trainer, monkeypatch):
    monkeypatch.setattr(Guessing, "seen", [])
    trainer._generate_and_score_completions([dict(row) for row in ROWS])
    prompts, completions, masks, *_ = trainer.generated
    expected = [
        sides(prompt + completion, [0] * len(prompt) + mask)
        for prompt, completion, mask in zip(prompts, completions, masks, strict=True)
    ]
    journals, Guessing.seen = Guessing.seen, []
    assert {entry[0] for journal in journals for entry in journal} == {"reset", "guess", "hint", "reward"}
    assert max(map(len, journals)) > 5 and min(map(len, journals)) == 2

    monkeypatch.setitem(sys.modules, "guessing", types.SimpleNamespace(Guessing=Guessing))
    template = trainer.chat_template or trainer.processing_class.chat_template
    tokenizer = Tokenizer(
        make_tokenizer(None).backend, eos_token_id=EOS, pad_token_id=0, chat_template=template, specials={}
    )
    episodes = make_episodes(tokenizer, max_seq_len=8192)
    endpoint = Endpoint(episodes, tokenizer, model="policy", max_new_tokens=512)
    await endpoint.start("127.0.0.1")
    environment = EnvironmentFactory({"factory": "guessing:Guessing"})
    policy = SampledText(tokenizer, lambda prompt, seed: script(prompt))
    rollouts = AgentRolloutImpl(
        tokenizer, {"environment_factory": environment}, 1, 8192, policy, episodes=episodes,
        base_url=lambda: f"http://127.0.0.1:{endpoint.port}/v1", model="policy",
    )  # fmt: skip
    ours, rewards = [], []
    try:
        for index, row in enumerate(ROWS):
            ids = torch.zeros(1, dtype=torch.int64)
            sample = {
                "message_log": [{"role": "user", "content": "", "token_ids": ids}],
                "extra_env_info": row,
                "idx": index,
            }
            record = await rollouts.run_rollout(sample | {"task_name": "environment_factory"})
            [completion] = record.completions
            log = completion.message_log
            ours.append([(int(t), m["role"] == "assistant") for m in log for t in m["token_ids"]])
            rewards.append(completion.reward)
    finally:
        await endpoint.close()

    assert rewards == pytest.approx(trainer.rewards[:, 0].tolist())
    assert Guessing.seen == journals
    for index, (one, other) in enumerate(zip(ours, expected, strict=True)):
        assert one == other, f"row {index}:\n{text(tokenizer, one)}\n---\n{text(tokenizer, other)}"


def text(tokenizer, pairs):
    return tokenizer.decode([token for token, _ in pairs])


def test_tools_have_the_schemas_that_trl_renders(trainer, monkeypatch):
    from transformers.utils.chat_template_utils import get_json_schema

    monkeypatch.setitem(sys.modules, "guessing", types.SimpleNamespace(Guessing=Guessing))
    environment = EnvironmentFactory({"factory": "guessing:Guessing"})
    assert environment._kinds[None].schemas == [get_json_schema(tool) for tool in trainer._env_tools[None]]
    assert environment._kinds[None].tools == ["guess", "hint"]
