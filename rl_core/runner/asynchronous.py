"""GRPO and its relatives, bounded asynchronous: rollouts generate the groups of later steps while one is trained.

    version     v                          v + 1                      v + 2
    trainer     | receive, train, publish  | receive, train, publish  | ...
    rollouts    | groups of this step, then of the next ones          | ...

A step runs as on policy, with one difference: it opens when the weights before it are published, so prompts are leased while the
previous step is validated, logged and saved. Finished groups wait on the channel `trajectories`. `admission.Bounded` keeps every trained
token within algorithm.maxStaleness versions.
"""

from rl_core.runner.reasoning import ReasoningRunner


class AsyncReasoningRunner(ReasoningRunner):
    """The text program with bounded asynchronous training: completions are at most `algorithm.maxStaleness` versions old."""

    _opened_step = 0
    """Number of the step that was opened last."""

    def publish(self) -> None:
        """Publish the new version, then open the next step.

        Its prompts are leased while this step is validated, logged and saved.
        """
        super().publish()
        if self.progress.step < self.applied.spec.algorithm.steps:
            self.open_step()

    def open_step(self) -> None:
        """Open the next step, unless it is open already. Prompts of later steps may be leased too."""
        step = self.progress.step + 1
        if self._opened_step != step:
            self._opened_step = step
            super().open_step()

    def idle(self) -> dict[str, float]:
        """Return `time/idle_actor` and `time/idle_rollout` of the step, in seconds. Rollouts are idle only while weights are published."""
        return {"time/idle_actor": self.report.seconds("rollout"), "time/idle_rollout": self.report.seconds("sync")}
