"""The part `proofs` of weight_sync.py: syncs in bfloat16 to real engines, each of which the proof and the content check judge."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""Of the model of `examples/arithmetic`."""
PROMPT = list(range(2, 20))
RATE = 1e-5
"""Size of an update, as AdamW makes it at such a learning rate: so small that most bfloat16 weights stay as they are."""


def judge_syncs(engine: str, runs: int) -> dict:
    """Return how many of `runs` syncs of equal weights were refused by the engine's proof or by the content check, and their differences."""
    import torch

    from rl_core.rollouts.hf.worker import HFRolloutWorker
    from rl_core.rollouts.sglang import SGLangWorker
    from rl_core.runner.content_check import PROBE_TOKENS
    from rl_core.runner.divergence import DivergenceAlarm
    from tests.integration import rollout_world

    rollout_world.CONFIG.update(SIZES)
    worker, rollout = {"hf": (HFRolloutWorker, {}), "sglang": (SGLangWorker, {"engine": "sglang"})}[engine]
    spec = {"model": {"path": "unused", "dtype": "bfloat16"}}
    world = rollout_world.World(worker, max_seq_len=64, spec=spec, **rollout)
    generator = torch.Generator().manual_seed(3)
    masters = rollout_world.random_state(1)
    trainer = rollout_world.transformers_model(masters).bfloat16()
    alarm = DivergenceAlarm(world.spec.weights.content_check_tolerance, exact=False)
    refused, alarms, differences, proofs = 0, 0, [], set()
    try:
        world.start()
        for _ in range(runs):
            for tensor in masters.values():
                tensor.add_(RATE * torch.randn(tensor.shape, generator=generator).sign())
            state = {name: tensor.bfloat16() for name, tensor in masters.items()}
            trainer.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]})
            refused += not world.publish_next(state).acked
            proofs.add(world.worker.status()["weights_proof"])
            answer = world.on_loop(world.worker.probe(PROMPT, PROBE_TOKENS))
            expected = rollout_world.trainer_logprobs(trainer, PROMPT, answer.ids)
            differences.append((torch.tensor(answer.logprobs) - expected).abs())
            alarms += alarm.judge(differences[-1].tolist()) is not None
    finally:
        world.close()
    of_tokens = torch.cat(differences)
    return {
        "refused by the proof": refused,
        "alarms of the content check": alarms,
        "proof": sorted(proofs),
        "median difference of a token, nats": float(of_tokens.median()),
        "largest": float(of_tokens.max()),
    }
