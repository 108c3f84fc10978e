"""`rljob serve`: the model of a folder behind the endpoint, whose log-probabilities are those of the model in `transformers`."""

import json
import shutil

import openai
import pytest
import torch
import yaml
from transformers import Qwen2Config, Qwen2ForCausalLM

from rl_core.api.errors import ConfigError
from rl_core.cli.serve import find_model, stored_tensors
from rl_core.data.tokenizer import Tokenizer, read_files
from rl_core.rollouts.serving import serve
from tests.unit.endpoint.conftest import TEMPLATES, make_backend


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder with random weights."""
    path = tmp_path_factory.mktemp("model")
    backend = make_backend()
    backend.save(str(path / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "pad_token": "<pad>", "chat_template": TEMPLATES["chatml"]}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vocabulary = {"vocab_size": backend.get_vocab_size(), "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    config = Qwen2Config(**sizes, **vocabulary, num_key_value_heads=2, max_position_embeddings=128)
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def served_model(folder):
    """Return the tokenizer of a model folder, and the context in which the model is served."""
    model_folder, spec = find_model(str(folder), None, ["rollout.sampling.maxNewTokens=8"])
    tokenizer = Tokenizer.from_folder(model_folder)
    served = serve(
        spec,
        read_files(model_folder),
        tokenizer,
        lambda wanted: stored_tensors(model_folder, wanted),
        lambda stage: None,
        device="cpu",
        host="127.0.0.1",
        port=0,
    )
    return tokenizer, served


async def test_a_served_model_answers_with_the_log_probabilities_of_its_weights(folder):
    tokenizer, served = served_model(folder)
    messages = [{"role": "user", "content": "hi"}]
    async with served as base_url, openai.AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0) as client:
        for _ in range(2):
            answer = await client.chat.completions.create(
                model="policy", messages=messages, logprobs=True, extra_body={"return_token_ids": True}
            )
            [choice] = answer.choices
            messages += [{"role": "assistant", "content": choice.message.content}, {"role": "user", "content": "on"}]
    prompt, ids = answer.prompt_token_ids, choice.token_ids
    assert tokenizer.decode(prompt).count("<|im_start|>") == 4
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
    for at, (token, entry) in enumerate(zip(ids, choice.logprobs.content, strict=True), start=len(prompt) - 1):
        assert entry.logprob == pytest.approx(expected[at, token].item(), abs=1e-4)


async def test_a_model_without_a_chat_template_completes_text_and_refuses_messages(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "plain")
    (tmp_path / "plain" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "pad_token": "<pad>"}))
    _, served = served_model(tmp_path / "plain")
    async with served as base_url, openai.AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0) as client:
        answer = await client.completions.create(model="policy", prompt="hi")
        assert answer.usage.completion_tokens >= 1
        with pytest.raises(openai.BadRequestError, match="need a chat template"):
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])


def test_a_run_is_served_with_its_settings_once_it_has_ended(folder, tmp_path):
    job = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "run"},
        "spec": {
            "model": {"path": str(folder)},
            "data": {"train": "rows.jsonl"},
            "rollout": {"sampling": {"temperature": 0.5}},
        },
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    with pytest.raises(ConfigError, match="a run that has ended"):
        find_model(str(tmp_path), None, [])
    shutil.copytree(folder, tmp_path / "model")
    found, spec = find_model(str(tmp_path), "sglang", [])
    assert (found, spec.rollout.sampling.temperature, spec.rollout.engine) == (tmp_path / "model", 0.5, "sglang")


def test_what_cannot_be_served_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="TARGET"):
        find_model(str(tmp_path), None, [])
    with pytest.raises(ConfigError, match="engine"):
        find_model(str(folder), "vllm", [])
    for wanted in ({"model.absent": ((1,), "float32")}, {"model.norm.weight": ((31,), "float32")}):
        with pytest.raises(ConfigError, match=r"model\.(absent|norm)"):
            list(stored_tensors(folder, wanted))
