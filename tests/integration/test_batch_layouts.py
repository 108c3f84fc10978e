"""A real Hugging Face model gives equal log-probabilities and gradients however its rows are laid out."""

import pytest
import torch

from rl_core.api.records import Completion, PromptGroupRecord
from rl_core.batching.collate import collate_groups
from rl_core.batching.microbatch import plan_microbatches
from rl_core.batching.packing import pack_rows, unpack_rows

VOCAB = 61


@pytest.fixture(scope="module")
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


@pytest.fixture(scope="module")
def records():
    generator = torch.Generator().manual_seed(1)

    def tokens(count):
        return torch.randint(1, VOCAB, (count,), generator=generator)

    found = []
    for number, prompt_length in enumerate((3, 7, 5)):
        prompt = [{"role": "user", "content": "", "token_ids": tokens(prompt_length)}]
        completions = []
        for length in (1 + number, 6, 11 - number):
            turn = {
                "role": "assistant",
                "content": "",
                "token_ids": tokens(length),
                "generation_logprobs": torch.zeros(length),
            }
            completions.append(Completion(message_log=[*prompt, turn], reward=1.0))
        found.append(
            PromptGroupRecord(
                prompt_idx=number,
                prompt=prompt,
                extra_env_info=None,
                metadata={},
                completions=completions,
                group_id=f"0-{number}",
            )
        )
    return found


def shifted(logits, ids):
    scores = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(scores, (1, 0))


def padded_log_probs(model, batch):
    out = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids)
    return shifted(out.logits, batch.input_ids)


@pytest.mark.parametrize("budget", [24, 60, 400])
def test_packed_micro_batches_give_the_gradient_of_the_padded_batch(model, records, budget):
    batch = collate_groups(records, pad_token_id=0, max_length=64)
    model.zero_grad()
    (padded_log_probs(model, batch) * batch.loss_mask).sum().backward()
    whole = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for rows in plan_microbatches(batch.lengths.tolist(), token_budget=budget):
        packed = pack_rows(batch.input_ids, batch.lengths, rows=rows)
        logits = model(input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False).logits
        width = int(packed.lengths.max())
        values = shifted(unpack_rows(logits, packed, width=width), unpack_rows(packed.input_ids, packed, width=width))
        (values * batch.loss_mask[rows][:, :width]).sum().backward()
    for parameter, expected in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-9)
