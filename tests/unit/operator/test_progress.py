"""Polling runners: over real HTTP by signed calls, at the interval that the number of jobs asks for, one dead runner holds up none."""

import asyncio
import json
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rl_core.plan import keys
from rl_core.plan.signatures import Guard, Peer, ReceivedCall
from rljob_operator.model import ContainerEnd, ControlCall, PodView, Progress
from rljob_operator.runtime.cache import JobKey
from rljob_operator.runtime.master_key import UnknownKey
from rljob_operator.runtime.progress import (
    JOBS_PER_SECOND,
    LARGEST,
    Poller,
    RunnerClient,
    RunnerError,
    RunnerTarget,
    is_runner,
)

MASTER = bytes(range(32))


def pod(index=0, epoch=1, role="actor", **more):
    base = {"ip": "10.0.0.1", "phase": "Running", "job_uid": "job"}
    return PodView(
        name="p",
        uid=f"{role}{index}-{epoch}",
        role=role,
        index=index,
        epoch=epoch,
        created=0.0,
        **{**base, **more},
    )


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, True),
        ({"ip": ""}, False),
        ({"phase": "Pending"}, False),
        ({"job_uid": "an earlier job"}, False),
        ({"ended": (ContainerEnd(name="c", exit_code=0, reason="", message=""),)}, False),
    ],
    ids=["running", "no address yet", "not running", "not ours", "ended"],
)
def test_only_a_running_actor_0_of_ours_is_asked(facts, expected):
    assert is_runner(pod(**facts), job_uid="job") is expected


@pytest.fixture
async def runner():
    """A runner of "job" under epoch 1 over HTTP; `answers` maps paths to (status, text), `asked` holds calls that were taken."""
    asked = []
    guard = Guard(Peer(token=keys.control_token(MASTER, "job"), uid="job", epoch=1))

    async def handle(request):
        body, headers = await request.read(), {name.lower(): value for name, value in request.headers.items()}
        status, text = server.answers.get(request.path, (200, "{}"))
        call = ReceivedCall.read(request.method, request.path, headers)
        if guard.check(call) is not None or not call.matches_body(body):
            status, text = 401, ""
        else:
            asked.append((request.method, request.path, body.decode()))
        signed = guard.sign_answer(call, status, text.encode())
        return web.Response(status=status, text=text, headers=signed)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    async with TestServer(app) as server:
        server.answers, server.asked = {}, asked
        yield server


@pytest.fixture
async def client(runner):
    async with aiohttp.ClientSession() as session:
        yield RunnerClient(master=lambda uid: MASTER, session=session, port=runner.port)


async def test_the_runner_is_asked_by_signed_calls_and_the_token_stays_here(runner, client):
    runner.answers["/status"] = (200, '{"step": 3}')
    assert await client.status("job", "127.0.0.1", epoch=1) == {"step": 3}
    assert runner.asked == [("GET", "/status", "")]


async def test_a_stale_leader_reaches_nothing_of_a_later_epoch(runner, client):
    with pytest.raises(RunnerError):
        await client.status("job", "127.0.0.1", epoch=0)
    assert await client.call("job", replace(FINISH, epoch=0)) == ""
    assert runner.asked == []


async def test_a_stranger_on_a_reused_address_learns_nothing_and_is_not_believed(tenant):
    heard = []

    async def stranger(writer, answer, head):
        heard.append(head)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n" + b'{"step": 321}')

    port = await tenant(stranger)
    async with aiohttp.ClientSession() as session:
        client = RunnerClient(master=lambda uid: MASTER, session=session, port=port)
        with pytest.raises(RunnerError, match="must be signed by the runner of job job, epoch 1"):
            await client.status("job", "127.0.0.1", epoch=1)
        assert await client.call("job", FINISH) == ""
    assert len(heard) == 2 and all(head.startswith(b"GET /status") for head in heard), "no change is told to a stranger"
    assert not any(keys.control_token(MASTER, "job").encode() in head for head in heard)


@pytest.mark.parametrize("answer", [(500, "broken"), (200, "no json"), (200, "[1]"), (401, "")])
async def test_an_answer_that_is_no_status_is_an_error(runner, client, answer):
    runner.answers["/status"] = answer
    with pytest.raises(RunnerError):
        await client.status("job", "127.0.0.1", epoch=1)


async def test_a_runner_that_is_not_there_is_an_error(client):
    with pytest.raises(RunnerError):
        await client.status("job", "127.0.0.2", epoch=1)


FINISH = ControlCall(method="POST /finish", body={"reason": "suspend"}, ip="127.0.0.1", epoch=1)


async def whole(writer, answer, head):
    writer.write(answer(b'{"step": 321}'))


async def split(writer, answer, head):
    """The runner's own status of some KiB arrives in several TCP segments."""
    sent = answer(json.dumps({"step": 321, "members": ["m" * 100] * 140}).encode())
    writer.write(sent[:1460])
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.write(sent[1460:])


async def nested(writer, answer, head):
    writer.write(answer(b"[" * 200_000))


async def nested_object(writer, answer, head):
    writer.write(answer(b'{"a":' * 200_000))


async def oversized(writer, answer, head):
    writer.write(answer(b'{"a": "' + b"x" * (LARGEST + 1) + b'"}'))


async def endless(writer, answer, head):
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n{")
    while not writer.is_closing():
        writer.write(b" " * 65536)
        await writer.drain()


async def slow(writer, answer, head):
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(60)


async def cut(writer, answer, head):
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")


async def no_http(writer, answer, head):
    writer.write(b"\x00\xff" * 100)


def signed_answer(head):
    """Return a function that makes the signed answer to a call: a tenant's program in the runner's pod holds the token."""
    lines = (line.partition(": ") for line in head.decode().split("\r\n")[1:])
    headers = {name.lower(): value for name, _, value in lines}
    call = ReceivedCall.read("GET", "/status", headers)
    guard = Guard(Peer(token=keys.control_token(MASTER, call.uid), uid=call.uid, epoch=1))

    def answer(body):
        signed = guard.sign_answer(call, 200, body)
        fields = "".join(f"{name}: {value}\r\n" for name, value in signed.items())
        return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n{fields}\r\n".encode() + body

    return answer


@pytest.fixture
async def tenant():
    """Starts a program of a tenant that answers in its own way; returns its port."""
    servers, talks = [], set()

    async def start(behaviour):
        async def talk(reader, writer):
            talks.add(asyncio.current_task())
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                await behaviour(writer, signed_answer(head), head)
                await writer.drain()
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()

        servers.append(await asyncio.start_server(talk, "127.0.0.1", 0))
        return servers[-1].sockets[0].getsockname()[1]

    yield start
    for server in servers:
        server.close()
    for task in talks:
        task.cancel()
    await asyncio.gather(*talks, return_exceptions=True)


@pytest.mark.parametrize("behaviour", [nested, nested_object, oversized, endless, slow, cut, no_http])
async def test_whatever_a_runner_answers_the_poller_goes_on(tenant, monkeypatch, behaviour):
    monkeypatch.setattr("rljob_operator.runtime.progress.DEADLINE", aiohttp.ClientTimeout(total=1.0))
    monkeypatch.setattr("rljob_operator.runtime.progress.TICK", 0.02)
    bad, good = await tenant(behaviour), await tenant(whole)
    known, answered = {}, asyncio.Event()
    async with aiohttp.ClientSession() as session:
        clients = {port: RunnerClient(master=lambda uid: MASTER, session=session, port=port) for port in (bad, good)}

        class Both:
            """Two runners on one address: the port stands for the job."""

            async def status(self, job_uid, ip, *, epoch):
                return await clients[int(job_uid)].status(job_uid, ip, epoch=epoch)

        def report(key, uid, progress):
            known[int(uid)] = progress
            if len(known) == 2:
                answered.set()

        targets = [
            RunnerTarget(key=JobKey("n", str(p)), job_uid=str(p), pod_uid=str(p), ip="127.0.0.1", epoch=1)
            for p in (bad, good)
        ]
        poller = Poller(
            client=Both(),
            targets=lambda: targets,
            known=lambda key: known.get(int(key.name)),
            report=report,
            enqueue=lambda key: None,
            interval=0.1,
        )
        polls = asyncio.create_task(poller.run())
        async with asyncio.timeout(30):
            await asyncio.wait([polls, asyncio.create_task(answered.wait())], return_when=asyncio.FIRST_COMPLETED)
        assert not polls.done(), "one runner's answer ended the polls of all"
        polls.cancel()
        await asyncio.gather(polls, return_exceptions=True)
    assert known[bad].error and known[bad].failing_since is not None and known[bad].status == {}
    assert known[good].error == "" and known[good].status == {"step": 321}


async def test_a_job_whose_master_key_is_not_there_is_told_and_its_runner_left_alone(runner):
    def unknown(uid):
        raise UnknownKey(f"no key for {uid}")

    async with aiohttp.ClientSession() as session:
        with pytest.raises(RunnerError, match="no key for job"):
            await RunnerClient(master=unknown, session=session, port=runner.port).status("job", "127.0.0.1", epoch=1)
    assert runner.asked == []


async def test_a_status_in_several_segments_is_read_to_its_end(tenant):
    port = await tenant(split)
    async with aiohttp.ClientSession() as session:
        status = await RunnerClient(master=lambda uid: MASTER, session=session, port=port).status(
            "job", "127.0.0.1", epoch=1
        )
    assert status["step"] == 321 and len(status["members"]) == 140


def test_a_failure_of_the_poll_itself_is_that_jobs_alone(fake_time):
    async def scenario():
        bench = Bench("a", "b")
        bench.runners.answers["a"] = KeyError("a bug")
        await bench.run(20)
        assert bench.known[JobKey("ns", "a")].error == "KeyError: 'a bug'" and bench.polls("b") >= 3

    fake_time(scenario())


async def test_control_calls_carry_their_body_and_never_raise(runner, client):
    call = ControlCall(method="POST /drain", body={"pods": ["a"]}, ip="127.0.0.1", epoch=1)
    assert await client.call("job", call) == ""
    assert runner.asked == [("GET", "/status", ""), ("POST", "/drain", '{"pods": ["a"]}')], "a challenge first"
    runner.answers["/drain"] = (400, "no")
    assert await client.call("job", call) == "HTTP 400: no"
    runner.answers["/drain"] = (503, "starting")
    assert await client.call("job", call) == "", "not a verdict on the call"
    assert await client.call("job", replace(FINISH, ip="127.0.0.2")) == ""


class FakeRunners:
    """Stands in for RunnerClient: answers per address after a time."""

    def __init__(self):
        self.asked, self.answers, self.seconds = [], {}, {}

    async def status(self, job_uid, ip, *, epoch):
        self.asked.append((asyncio.get_running_loop().time(), ip))
        await asyncio.sleep(self.seconds.get(ip, 0.01))
        answer = self.answers.get(ip, {})
        if isinstance(answer, Exception):
            raise answer
        return answer


class Bench:
    def __init__(self, *ips, interval=5.0):
        self.runners, self.known, self.enqueued = FakeRunners(), {}, []
        self.targets = [
            RunnerTarget(key=JobKey("ns", ip), job_uid=ip, pod_uid=f"pod-{ip}", ip=ip, epoch=1) for ip in ips
        ]
        self.poller = Poller(
            client=self.runners,
            targets=lambda: self.targets,
            known=self.known.get,
            report=lambda key, uid, progress: self.known.__setitem__(key, progress),
            enqueue=self.enqueued.append,
            interval=interval,
            clock=lambda: asyncio.get_running_loop().time(),
        )

    async def run(self, seconds):
        task = asyncio.create_task(self.poller.run())
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def polls(self, ip):
        return sum(1 for _, asked in self.runners.asked if asked == ip)


def test_each_runner_is_asked_once_per_interval(fake_time):
    async def scenario():
        bench = Bench("a", "b")
        await bench.run(100)
        assert 17 <= bench.polls("a") <= 23 and 17 <= bench.polls("b") <= 23

    fake_time(scenario())


def test_many_jobs_are_asked_less_often(fake_time):
    async def scenario():
        bench = Bench(*(f"ip-{n}" for n in range(1000)))
        await bench.run(200)
        assert len(bench.runners.asked) <= 1.2 * JOBS_PER_SECOND * 200

    fake_time(scenario())


def test_jobs_that_wait_for_their_runners_word_are_asked_as_often_as_with_few(fake_time):
    async def scenario():
        bench = Bench(*(f"ip-{n}" for n in range(1000)))
        await bench.run(100)
        few = bench.polls("ip-0")
        bench.targets[0] = replace(bench.targets[0], awaited=True)
        await bench.run(100)
        assert few <= 4 and bench.polls("ip-0") - few >= 17

    fake_time(scenario())


def test_a_lost_poll_is_repeated_soon_and_a_silent_runner_waits_its_turn(fake_time):
    async def scenario():
        bench = Bench(*(f"ip-{n}" for n in range(1000)))
        bench.runners.answers["ip-0"] = RunnerError("no route")
        await bench.run(45)
        assert bench.polls("ip-0") == 2 and bench.polls("ip-1") == 1
        assert bench.known[bench.targets[0].key].failures == 2

    fake_time(scenario())


def test_a_runner_that_does_not_answer_holds_up_no_other(fake_time):
    async def scenario():
        bench = Bench("dead", "alive")
        bench.runners.seconds["dead"] = 1000.0
        await bench.run(60)
        assert bench.polls("dead") == 1 and bench.polls("alive") >= 9

    fake_time(scenario())


def test_a_new_pod_is_asked_at_once(fake_time):
    async def scenario():
        bench = Bench("a", interval=50.0)
        task = asyncio.create_task(bench.run(40))
        await asyncio.sleep(5)
        bench.targets = [RunnerTarget(key=bench.targets[0].key, job_uid="a", pod_uid="another", ip="a2", epoch=1)]
        await task
        assert bench.polls("a2") == 1

    fake_time(scenario())


def test_the_job_is_looked_at_when_the_word_changed(fake_time):
    async def scenario():
        bench = Bench("a", interval=5.0)
        bench.runners.answers["a"] = {"step": 1}
        await bench.run(30)
        assert bench.enqueued == [JobKey("ns", "a")]

    fake_time(scenario())


def test_the_last_word_stays_while_polls_fail_and_the_silence_is_dated(fake_time):
    async def scenario():
        bench = Bench("a", interval=5.0)
        key = bench.targets[0].key
        bench.known[key] = Progress(status={"step": 9}, at=0.0, pod_uid="pod-a")
        bench.runners.answers["a"] = RunnerError("no route")
        await bench.run(30)
        progress = bench.known[key]
        assert progress.status == {"step": 9} and progress.error == "no route"
        assert progress.failing_since < 1.0, "since the first failure"
        bench.runners.answers["a"] = {"step": 10}
        await bench.run(10)
        assert bench.known[key].failing_since is None and bench.known[key].status == {"step": 10}

    fake_time(scenario())


def test_another_pods_word_is_not_taken_over(fake_time):
    async def scenario():
        bench = Bench("a")
        key = bench.targets[0].key
        bench.known[key] = Progress(status={"step": 9}, at=0.0, pod_uid="the pod before")
        bench.runners.answers["a"] = RunnerError("no route")
        await bench.run(3)
        assert bench.known[key].status == {} and bench.known[key].pod_uid == "pod-a"

    fake_time(scenario())
