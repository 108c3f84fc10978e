"""Classes that can be named by module, as remote workers must be."""

from rl_core.workers.worker import Worker


class Plain(Worker):
    """Answers."""

    def __init__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs

    def answer(self, value):
        return value

    async def answer_later(self, value):
        return value

    @staticmethod
    def double(x):
        return 2 * x

    def _secret(self):
        return "secret"


class Clashing(Worker):
    """Has a method that a group needs for itself."""

    def execute_on(self):
        return 0


class Hooked(Worker):
    """Has a method with the name of a hook and other arguments."""

    def drain(self, channel):
        return channel
