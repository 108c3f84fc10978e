"""The engine against transformers: greedy token for token, log-probabilities, dtypes, architectures outside the lean families."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rl_core.rollouts.hf import HFEngine
from rl_core.rollouts.hf.decoder import LeanDecoder
from rl_core.rollouts.hf.generic import TransformersDecoder
from rl_core.rollouts.hf.models import model_from_files
from rl_core.rollouts.hf.weights import DecoderWeights
from rl_core.rollouts.sampling import SamplingParams

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "llama3-rope": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3)),
    "linear-rope": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0})
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
    "experts": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=100,
            n_positions=256,
            n_embd=64,
            n_layer=2,
            n_head=4,
            eos_token_id=2,
            bos_token_id=1,
            initializer_range=0.2,
        )
    ),
}
LEAN = ("qwen2", "qwen3", "llama", "llama3-rope", "linear-rope", "mistral")


class Tokenizer:
    eos_token_id, pad_token_id = 2, 0

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(33 + int(i)) for i in ids)


def build(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias") or "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def prompts(count=9):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
    return [torch.randint(3, 100, (length,), generator=generator).tolist() for length in lengths]


def engine(model, **options):
    return HFEngine(model, Tokenizer(), **{"max_batch": 4, "max_seq_len": 128, **options})


def scored(model, prompt, ids, temperature=1.0):
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0].float() / temperature
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_generate_token_for_token(name):
    model = build(name)
    lean = engine(model)
    assert isinstance(lean._decoder, LeanDecoder if name in LEAN else TransformersDecoder)
    outputs = lean.generate(prompts(), {"max_new_tokens": 40, "temperature": 0.0})
    for prompt, output in zip(prompts(), outputs, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, pad_token_id=0
        )
        assert output.ids == expected[0, len(prompt) :].tolist()
        assert output.finish_reason == ("stop" if output.ids[-1] == 2 else "length")


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama3-rope", "mistral", "window", "experts", "gpt2"])
def test_sampled_log_probabilities_are_those_of_the_model_at_the_temperature(name):
    model = build(name)
    outputs = engine(model).generate(prompts(), {"max_new_tokens": 25, "temperature": 0.7}, list(range(9)))
    for prompt, output in zip(prompts(), outputs, strict=True):
        expected = scored(model, prompt, output.ids, 0.7)
        assert (expected - torch.tensor(output.logprobs)).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["window", "experts", "gpt2"])
def test_other_architectures_sample_the_same_alone_and_in_a_batch(name):
    model = build(name)
    sampling = {"max_new_tokens": 20, "temperature": 1.0}
    together = engine(model).generate(prompts(), sampling, list(range(9)))
    for index, prompt in enumerate(prompts()):
        alone = engine(model, max_batch=1).generate([prompt], sampling, [index])[0]
        assert alone.ids == together[index].ids


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_weights_of_another_model_make_it_that_model(name):
    first, second = build(name), build(name)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(1.1)
    used = engine(first)
    used.load_weights(second.state_dict().items(), 3)
    sampling = {"max_new_tokens": 20, "temperature": 0.0}
    assert [o.ids for o in used.generate(prompts(), sampling)] == [
        o.ids for o in engine(second).generate(prompts(), sampling)
    ]


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_rows_parked_with_their_cache_go_on_as_the_new_model_does_over_the_old_ones_keys_and_values(name):
    old, new, prompt = build(name), build(name), prompts()[0]
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(1.1)
    used = engine(build(name))
    used.submit(prompt, SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True), 1)
    for _ in range(4):
        used.step()
    used.interrupt(keep_cache=True)
    used.load_weights(new.state_dict().items(), 7)
    (_, output), *_ = [ended for _ in range(8) for ended in used.step()]
    assert output.versions == [(0, 4, 0), (4, 12, 7)]
    with torch.no_grad():
        # The last token before the update is the first one that the new weights read.
        cache = old(torch.tensor([[*prompt, *output.ids[:3]]]), use_cache=True).past_key_values
        for read, expected, logprob in zip(output.ids[3:-1], output.ids[4:], output.logprobs[4:], strict=True):
            scores = new(torch.tensor([[read]]), past_key_values=cache, use_cache=True).logits[0, -1].log_softmax(-1)
            assert int(scores.argmax()) == expected and abs(float(scores[expected]) - logprob) < 1e-4


def test_bfloat16_stays_close_to_transformers_in_bfloat16():
    model = build("qwen3")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5 if parameter.dim() > 1 else 1.0)
    exact = engine(model).generate(prompts(), {"max_new_tokens": 12}, list(range(9)))
    half = build("qwen3")
    half.load_state_dict(model.state_dict())
    half = half.to(torch.bfloat16)
    outputs = engine(half).generate(prompts(), {"max_new_tokens": 12}, list(range(9)))
    differences, theirs = [], []
    for prompt, output in zip(prompts(), outputs, strict=True):
        reference = scored(model, prompt, output.ids)
        differences.append((reference - torch.tensor(output.logprobs)).abs().mean())
        theirs.append((reference - scored(half, prompt, output.ids)).abs().mean())
    # Our bfloat16 forward must be as near to the float32 model as transformers' own bfloat16 forward.
    assert torch.stack(differences).mean() < 1.5 * torch.stack(theirs).mean() + 1e-3
    assert len(exact) == len(outputs)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama3-rope"])
def test_a_model_built_from_config_json_takes_the_weights_of_a_sync(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path)
    files = {"config.json": (tmp_path / "config.json").read_bytes()}
    empty = model_from_files(files, dtype=torch.float32)
    assert isinstance(empty, DecoderWeights)
    built = engine(empty, eos_token_ids=(2,))
    built.load_weights(model.named_parameters(), 1)
    sampling = {"max_new_tokens": 20, "temperature": 0.0}
    assert [o.ids for o in built.generate(prompts(), sampling)] == [
        o.ids for o in engine(model).generate(prompts(), sampling)
    ]


@pytest.mark.parametrize("name", ["gpt2", "experts"])
def test_other_architectures_are_built_from_config_json_through_transformers(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path)
    empty = model_from_files({"config.json": (tmp_path / "config.json").read_bytes()}, dtype=torch.float32)
    built = engine(empty)
    # GPT-2 is stored without the prefix of its decoder; the trainer has no such model.
    stored = model.named_parameters() if name == "gpt2" else load_file(tmp_path / "model.safetensors").items()
    built.load_weights(stored, 1)
    sampling = {"max_new_tokens": 10, "temperature": 0.0}
    assert [o.ids for o in built.generate(prompts(), sampling)] == [
        o.ids for o in engine(model).generate(prompts(), sampling)
    ]


def test_older_config_files_mean_the_same():
    from rl_core.rollouts.hf.config import DecoderConfig

    new = DecoderConfig.from_dict(LlamaConfig(**SIZES, rope_parameters=LLAMA3).to_dict())
    old = {
        **json.loads(LlamaConfig(**SIZES).to_json_string()),
        "rope_theta": 10000.0,
        "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"},
    }
    old.pop("rope_parameters", None)
    assert DecoderConfig.from_dict(old) == new


class WordTokenizer:
    """Byte-level pieces: some ids are half of a character, as in byte-level BPE."""

    eos_token_id, pad_token_id = 2, 0
    pieces = [b"", b"", b"", b"<", b"/", b"a", b">", b"</", b"a>", "\u00e9".encode()[:1], "\u00e9".encode()[1:], b" x"]

    def decode(self, ids, skip_special_tokens=False):
        return b"".join(self.pieces[int(i) % len(self.pieces)] for i in ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("stop", ["</a>", "\u00e9", "a>", "> x"])
def test_stop_strings_are_found_across_token_boundaries(stop):
    model = build("qwen2")
    tokenizer = WordTokenizer()
    free = HFEngine(model, tokenizer, max_batch=8, max_seq_len=250)
    sampling = {"max_new_tokens": 200, "temperature": 3.0, "ignore_eos": True}
    cut = HFEngine(model, tokenizer, max_batch=8, max_seq_len=250)
    ends = 0
    for seed in range(6):
        (whole,) = free.generate([[5, 6]], sampling, [seed])
        (output,) = cut.generate([[5, 6]], {**sampling, "stop_strings": [stop]}, [seed])
        expected = next(
            (n for n in range(1, len(whole.ids) + 1) if stop in tokenizer.decode(whole.ids[:n])), len(whole.ids)
        )
        assert output.ids == whole.ids[:expected]
        assert output.finish_reason == ("stop" if stop in tokenizer.decode(whole.ids) else "length")
        ends += output.finish_reason == "stop"
    assert ends
