"""What an engine is doing, as heartbeats tell it: rates of the last moment, and nothing that the engine does not know."""

from rl_core.rollouts.meter import EngineLoad, EngineMeter


class Engine:
    def __init__(self, **load):
        self.now, self.load = 0.0, EngineLoad(running=0, waiting=0)

    def meter(self):
        meter = EngineMeter(clock=lambda: self.now)
        meter.watch(lambda: self.load)
        return meter


def test_rates_are_those_since_the_last_reading():
    engine = Engine()
    meter = engine.meter()
    meter.count(30)
    meter.count(10)
    engine.now = 2.0
    engine.load = EngineLoad(running=3, waiting=1, kv_use=0.25, queued_seconds=1.5, queued_rows=3)
    assert meter.read() == {
        "rollout/tokens_per_second": 20.0, "rollout/running": 3.0, "rollout/waiting": 1.0, "rollout/kv_use": 0.25,
        "rollout/queue_seconds": 0.5,
    }  # fmt: skip
    engine.now, engine.load = 4.0, EngineLoad(running=0, waiting=0, kv_use=0.0, queued_seconds=1.5, queued_rows=3)
    assert meter.read() == {
        "rollout/tokens_per_second": 0.0, "rollout/running": 0.0, "rollout/waiting": 0.0, "rollout/kv_use": 0.0,
    }, "no row got a place: that is no wait of 0 seconds"  # fmt: skip


def test_two_readings_in_one_moment_make_no_rate_of_a_moment():
    engine = Engine()
    meter = engine.meter()
    meter.count(100)
    engine.now = 2.0
    first = meter.read()
    meter.count(1)
    engine.now = 2.001
    assert meter.read() == first
    engine.now = 4.0
    assert meter.read()["rollout/tokens_per_second"] == 0.5


def test_prefix_hits_are_told_by_engines_that_have_them():
    engine = Engine()
    meter = engine.meter()
    engine.now, engine.load = 2.0, EngineLoad(running=0, waiting=0, cached_tokens=30, prompt_tokens=40)
    assert meter.read()["rollout/prefix_hit_share"] == 0.75
    engine.now, engine.load = 4.0, EngineLoad(running=0, waiting=0)  # another engine took its place and counts from 0
    assert "rollout/prefix_hit_share" not in meter.read()
