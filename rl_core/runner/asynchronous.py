"""GRPO and its relatives, bounded asynchronous: rollouts generate the groups of later steps while one is trained.

    version     v                          v + 1                      v + 2
    trainer     | receive, train, publish  | receive, train, publish  | ...
    rollouts    | groups of this step, then of the next ones          | ...

A step reads as on policy. What differs: it is open, so that prompts are given out, from the publication before it on, and finished
groups wait on `trajectories`. `admission.Bounded` holds each trained token to algorithm.maxStaleness.
"""

from collections.abc import Mapping

from rl_core.runner.reasoning import ReasoningRunner


class AsyncReasoningRunner(ReasoningRunner):
    """Trains on completions that are at most `algorithm.maxStaleness` versions old."""

    _opened = 0
    """The step that was opened last."""

    def publish(self) -> None:
        """Send the new version; the next step is open at once, while this one is validated, logged and saved."""
        super().publish()
        if self.progress.step < self.applied.spec.algorithm.steps:
            self.open_step()

    def open_step(self) -> None:
        """Give prompts out for the next step and those after it, unless that is under way."""
        step = self.progress.step + 1
        if self._opened != step:
            self._opened = step
            super().open_step()

    def idle(self) -> dict[str, float]:
        """Return the seconds that each side waited for the other: rollouts wait only while weights are published."""
        return {"time/idle_actor": self.report.seconds("rollout"), "time/idle_rollout": self.report.seconds("sync")}


def admissible(outstanding: int, *, prompts_per_step: int, max_staleness: int) -> int:
    """Return how many groups may be leased beside `outstanding` ones that are not trained yet."""
    return max(prompts_per_step * (max_staleness + 1) - outstanding, 0)


def select_groups(
    finished: Mapping[str, int],
    running: Mapping[str, int],
    *,
    version: int,
    prompts_per_step: int,
    max_staleness: int,
) -> list[str]:
    """Return the groups to train at `version`, oldest first; empty = wait, as groups lack or older ones would come too late.

    Both maps go from group id to the lowest version of the group's tokens. Groups beyond the bound are neither chosen nor waited for.
    """
    oldest = version - max_staleness
    order = sorted((v_min, group_id) for group_id, v_min in finished.items() if v_min >= oldest)
    chosen, rest = order[:prompts_per_step], [v_min for v_min, _ in order[prompts_per_step:]]
    rest += [v_min for v_min in running.values() if v_min >= oldest]
    in_time = all(
        sum(v_min <= oldest + ahead for v_min in rest) <= prompts_per_step * ahead for ahead in range(max_staleness + 1)
    )
    return [group_id for _, group_id in chosen] if in_time and len(chosen) == prompts_per_step else []
