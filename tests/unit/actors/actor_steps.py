"""A step of an actor as the tests of this folder run it: prepared, trained, or only its gradient taken."""

NOT_SUMS = ("time/", "perf/")


def prepare(actor, records):
    """Have the actor hold `records` with all that its loss needs; return them as the engine holds them."""
    actor.load_batch(records)
    actor.compute_log_probs()
    actor.compute_advantages_and_returns()
    return actor.engine.prepared


def train(actor, records, step=1):
    """Return the metrics of a step on `records`."""
    prepare(actor, records)
    return actor.run_training(step)


def gradients(actor, records):
    """Return the metrics of a step on `records` and the gradient that it would apply; nothing is changed."""
    prepare(actor, records)
    return gradients_of(actor)


def gradients_of(actor):
    """Return what `gradients` does, of what the actor holds."""
    taken = {}

    def optimizer_step():
        trained = {name: p for name, p in actor.manager.model.named_parameters() if p.requires_grad}
        taken.update({name: p.grad.clone() for name, p in trained.items()})
        actor.manager.optimizer.zero_grad()
        return 0.0, [0.0]

    actor.manager.optimizer_step = optimizer_step
    metrics = actor.run_training(1)
    del actor.manager.optimizer_step
    return metrics, taken


def sums(metrics):
    """Return the metrics that do not depend on the clock or on how rows were cut."""
    return {name: value for name, value in metrics.items() if not name.startswith(NOT_SUMS)}
