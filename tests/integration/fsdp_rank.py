"""Actor ranks as processes of their own: `python fsdp_rank.py PLAN.json` runs one; what it saw goes to PLAN's `out` as JSON.

PLAN: {rank, world_size, out, scenarios: [{name, spec, groups: [numbers of rank 0, ...], verbs: [[verb, argument...], ...]}]}.
Each scenario has a fresh actor in the same process group.
"""

import asyncio
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from actor_samples import make_record

from rl_core.actors.fsdp.actor import FSDPActor
from rl_core.api.errors import RLJobError
from rl_core.workers.context import WorkerContext, stand_alone_identity


class Rank:
    """The verbs of a scenario, and what they saw."""

    def __init__(self, spec: dict, groups: list[list[int]], rank: int, world_size: int) -> None:
        self.rank, self.groups = rank, groups[rank]
        self.seen: dict = {"metrics": [], "scores": []}
        context = WorkerContext(replace(stand_alone_identity(), rank=rank, world_size=world_size))
        self.actor = FSDPActor.hosted(context, spec)
        self.actor.init_worker()

    def train(self, step: int) -> None:
        """Train on this rank's groups, other ones in each step."""
        self.actor.load_batch([make_record(group + 100 * step) for group in self.groups])
        self.actor.compute_log_probs()
        self.actor.compute_advantages_and_returns()
        self.seen["metrics"].append(self.actor.run_training(step))

    def cancel(self, step: int, micro_batch: int) -> None:
        """Train as `train`; rank 1 alone is asked to give the step up while it runs that micro-batch."""
        plain, began = self.actor.before_micro_batch, []

        def before(model, is_last):
            began.append(is_last)
            if self.rank == 1 and len(began) == micro_batch + 1:
                asyncio.run(self.actor.cancel_training())
            return plain(model, is_last)

        self.actor.before_micro_batch = before
        self.train(step)
        del self.actor.before_micro_batch
        self.seen["begun"] = len(began)

    def poison(self) -> None:
        """Make this rank's next gradient infinite."""
        parameter = next(iter(self.actor.model.parameters()))
        parameter.register_post_accumulate_grad_hook(lambda p: p.grad.fill_(float("inf")) if self.rank == 0 else None)

    def save(self, path: str, step: int) -> None:
        """Save a checkpoint."""
        self.actor.save_checkpoint(path, step)

    def load(self, path: str) -> None:
        """Load a checkpoint."""
        self.actor.load_checkpoint(path)

    def export(self, path: str) -> None:
        """Export a Hugging Face folder."""
        self.actor.export_hf(path)

    def score(self) -> None:
        """Score one fixed sequence."""
        self.seen["scores"].append(self.actor.score([1, 2, 3, 4, 5, 6], 3))

    def offload(self) -> None:
        """Take everything away and bring it back."""
        self.actor.offload_param_and_grad(True)
        self.actor.offload_optimizer()
        self.actor.load_param_and_grad(0, True)
        self.actor.load_optimizer(0)

    def weights(self) -> None:
        """Gather the weights on rank 0 and say which placements the shards have."""
        whole = self.actor.get_model_state_dict(True, True)
        self.seen["weights"] = {name: tensor.float().flatten().tolist() for name, tensor in whole.items()}
        shards = self.actor.get_model_state_dict(False, False)
        self.seen["placements"] = sorted({str(tensor.placements) for tensor in shards.values()})

    def die(self, rank: int) -> None:
        """End this process at once if it is `rank`."""
        if self.rank == rank:
            os._exit(9)


def run_scenario(scenario: dict, rank: int, world_size: int) -> dict:
    """Run the verbs of one scenario on this rank; return what it saw."""
    actor = Rank(scenario["spec"], scenario["groups"], rank, world_size)
    try:
        for verb, *arguments in scenario["verbs"]:
            getattr(actor, verb)(*arguments)
    except RLJobError as error:
        actor.seen["error"] = f"{type(error).__name__}: {error}"
    actor.seen["counts"] = asdict(actor.actor.counts)
    return actor.seen


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    seen: dict = {}
    for scenario in plan["scenarios"]:
        seen[scenario["name"]] = run_scenario(scenario, plan["rank"], plan["world_size"])
        Path(plan["out"]).write_text(json.dumps(seen))
    # A lost peer leaves gloo's threads in a state whose tear-down may wait; what counts is on disk.
    os._exit(0)


if __name__ == "__main__":
    main()
