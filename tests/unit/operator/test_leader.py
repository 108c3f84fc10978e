"""The Lease: one leader at a time, takeover after silence, nobody acts on a Lease that is lost. Time jumps."""

import asyncio

import pytest

from rljob_operator import kinds
from rljob_operator.errors import Unavailable
from rljob_operator.runtime.leader import NAME, Leadership, LeaseLost


class Replica(Leadership):
    """A replica that remembers what it last reported."""

    def __init__(self, **options):
        super().__init__(**options, on_change=lambda leading: setattr(self, "leading", leading))
        self.leading = False


def replica(cluster, name, duration=15.0):
    return Replica(cluster=cluster, namespace="sys", identity=name, duration=duration)


def spec(cluster):
    return cluster.objects["Lease", "sys", NAME]["spec"]


def test_the_first_takes_it_and_the_second_waits(fake_time, cluster):
    async def scenario():
        first, second = replica(cluster, "a"), replica(cluster, "b")
        await first.acquire()
        keeping = asyncio.create_task(first.keep())
        waiting = asyncio.create_task(second.acquire())
        await asyncio.sleep(300)
        assert first.leading and not second.leading and not waiting.done()
        assert spec(cluster)["holderIdentity"] == "a"
        keeping.cancel()
        waiting.cancel()

    fake_time(scenario())


def test_a_silent_leader_is_replaced_after_the_whole_duration_and_not_before(fake_time, cluster):
    async def scenario():
        loop = asyncio.get_running_loop()
        first, second = replica(cluster, "a"), replica(cluster, "b")
        await first.acquire()
        await second.acquire()
        assert 15.0 <= loop.time() <= 15.0 + 3.0
        assert spec(cluster)["holderIdentity"] == "b"
        assert spec(cluster)["leaseTransitions"] == 1

    fake_time(scenario())


def test_a_released_lease_is_taken_at_the_next_look(fake_time, cluster):
    async def scenario():
        loop = asyncio.get_running_loop()
        first, second = replica(cluster, "a"), replica(cluster, "b")
        await first.acquire()
        waiting = asyncio.create_task(second.acquire())
        await asyncio.sleep(1)
        await first.release()
        await waiting
        assert loop.time() <= 1 + 3.0
        assert not first.leading

    fake_time(scenario())


def test_a_lease_renewed_in_the_last_moment_is_given_back_all_the_same(fake_time, cluster):
    async def scenario():
        leader = replica(cluster, "a")
        await leader.acquire()
        cluster.put(kinds.LEASE, "sys", cluster.objects["Lease", "sys", NAME])  # the renewal whose answer never came
        await leader.release()
        assert spec(cluster)["holderIdentity"] == ""

    fake_time(scenario())


def test_a_leader_that_cannot_renew_gives_up_before_another_may_begin(fake_time, cluster):
    async def scenario():
        loop = asyncio.get_running_loop()
        leader = replica(cluster, "a")
        await leader.acquire()
        cluster.fail("replace", NAME, *[Unavailable("no answer")] * 1000)
        with pytest.raises(LeaseLost):
            await leader.keep()
        assert loop.time() <= 10.0 + 0.01
        assert not leader.leading

    fake_time(scenario())


def test_a_short_silence_of_the_api_server_costs_nothing(fake_time, cluster):
    async def scenario():
        leader = replica(cluster, "a")
        await leader.acquire()
        cluster.fail("replace", NAME, *[Unavailable("no answer")] * 2)
        keeping = asyncio.create_task(leader.keep())
        await asyncio.sleep(100)
        assert leader.leading and not keeping.done()
        keeping.cancel()

    fake_time(scenario())


def test_a_leader_whose_lease_another_holds_ends_at_once(fake_time, cluster):
    async def scenario():
        leader = replica(cluster, "a")
        await leader.acquire()
        lease = cluster.objects["Lease", "sys", NAME]
        cluster.put(kinds.LEASE, "sys", {**lease, "spec": {**lease["spec"], "holderIdentity": "b"}})
        with pytest.raises(LeaseLost, match="'b'"):
            await leader.keep()
        await leader.release()
        assert spec(cluster)["holderIdentity"] == "b", "what is not ours is not given back"

    fake_time(scenario())


def late(cluster, seconds, *, verb):
    """Have the next request of a kind land at once, and its answer come after so many seconds."""
    send = getattr(cluster, verb)

    async def answer_late(*args):
        setattr(cluster, verb, send)
        answer = await send(*args)
        await asyncio.sleep(seconds)
        return answer

    setattr(cluster, verb, answer_late)


@pytest.mark.parametrize("verb", ["create", "replace"])
def test_an_answer_that_comes_when_another_may_lead_makes_no_leader(fake_time, cluster, verb):
    async def scenario():
        if verb == "replace":
            free = {"holderIdentity": "", "renewTime": "", "leaseDurationSeconds": 15}
            cluster.put(kinds.LEASE, "sys", {"metadata": {"name": NAME}, "spec": free})
        first, second, led = replica(cluster, "a"), replica(cluster, "b"), []
        late(cluster, 20.0, verb=verb)
        acquiring = asyncio.create_task(first.acquire())
        await asyncio.sleep(0.1)
        await second.acquire()
        keeping = asyncio.create_task(second.keep())
        for _ in range(300):
            await asyncio.sleep(0.1)
            led.append(first.leading and second.leading)
        assert not any(led) and not acquiring.done()
        acquiring.cancel()
        keeping.cancel()

    fake_time(scenario())


def test_the_time_that_the_acquiring_answer_took_counts(fake_time, cluster):
    async def scenario():
        loop = asyncio.get_running_loop()
        leader = replica(cluster, "a")
        late(cluster, 9.0, verb="create")
        await leader.acquire()
        cluster.fail("replace", NAME, *[Unavailable("no answer")] * 1000)
        with pytest.raises(LeaseLost):
            await leader.keep()
        assert loop.time() <= 10.0 + 0.01

    fake_time(scenario())


def test_a_renewal_whose_answer_was_lost_is_written_again(fake_time, cluster):
    async def scenario():
        leader = replica(cluster, "a")
        await leader.acquire()
        cluster.put(kinds.LEASE, "sys", cluster.objects["Lease", "sys", NAME])  # the renewal whose answer never came
        cluster.calls.clear()
        keeping = asyncio.create_task(leader.keep())
        await asyncio.sleep(6)
        assert [verb for verb, _, _ in cluster.calls] == ["replace", "read", "replace"]
        keeping.cancel()

    fake_time(scenario())


def test_two_that_start_together_do_not_both_lead(fake_time, cluster):
    async def scenario():
        replicas = [replica(cluster, name) for name in "abcd"]
        tasks = [asyncio.create_task(one.acquire()) for one in replicas]
        await asyncio.sleep(0.5)
        assert sum(one.leading for one in replicas) == 1
        for task in tasks:
            task.cancel()

    fake_time(scenario())


def test_the_holders_clock_does_not_matter(fake_time, cluster):
    """A renewal time of another century neither frees the Lease nor holds it for ever."""

    async def scenario():
        loop = asyncio.get_running_loop()
        body = {"holderIdentity": "far", "leaseDurationSeconds": 15, "renewTime": "2099-01-01T00:00:00.000000Z"}
        cluster.put(kinds.LEASE, "sys", {"metadata": {"name": NAME}, "spec": body})
        await replica(cluster, "a").acquire()
        assert 15.0 <= loop.time() <= 18.0

    fake_time(scenario())
