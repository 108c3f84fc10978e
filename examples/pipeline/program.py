"""The pipeline of pipeline.py in a job: the same worker classes in pods of their own, and a program in place of `main`."""

from rl_core import Channel
from rl_core.runner.group_program import GroupProgram

ROWS = 100


class Squares(GroupProgram):
    """Each step squares the next ROWS numbers."""

    def loop(self):
        channel, readers, scorers = (
            Channel.create("rows", maxsize=8),
            self.run.groups["reader"],
            self.run.groups["scorer"],
        )
        for step in self.steps():
            with step as metrics:
                rows = [ROWS * self.progress.step + i for i in range(ROWS)]
                scoring = scorers.score(channel, ROWS // scorers.world_size)
                self.stops.wait(readers.read(rows, channel))
                found = self.stops.wait(scoring)[0]
                metrics["reward/mean"] = sum(found[row] for row in rows) / ROWS
