"""Which key may do what with the channels of the built-in programs, over real sockets."""

import pytest

from rl_core.api.errors import ConfigError, InfrastructureError
from rl_core.api.identity import Identity
from rl_core.channel.server import ChannelServer
from rl_core.messages.channel import WORKER_MESSAGES, ChannelOptions
from rl_core.transports import curve
from rl_core.transports.rpc import RpcClient
from tests.curve_keys import generate_keys

TAKE = (5.0, True, None, 1, False, {})


def identity(role):
    return Identity(
        job="j",
        namespace="n",
        uid="u",
        epoch=0,
        role=role,
        pod=f"j-{role}-0",
        pod_index=0,
        group=role,
        rank=0,
        world_size=1,
    )


class Job:
    """A channel server with keys, the channel `trajectories`, and a client of each group."""

    def __init__(self, folder):
        for name, text in generate_keys(["runner", "channel", "actor", "rollout", "env"]).items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o400)
        self.server = ChannelServer(
            "tcp://127.0.0.1:0", curve.KeyRing(folder, "channel"), identity=identity("channel")
        ).start()
        self.clients = {
            role: RpcClient(self.server.address, curve.KeyRing(folder, role), identity(role), service="channel")
            for role in ("runner", "actor", "rollout", "env")
        }
        self.call("runner", "create", "trajectories", ChannelOptions())

    def call(self, role, method, *args):
        return self.clients[role].call_sync(method, *args, timeout=30)

    def put(self, role, item):
        self.call(role, "put", "trajectories", "k", 0.0, [item], 5.0, False)

    def take(self, role):
        return self.call(role, "take", "trajectories", "k", *TAKE)

    def close(self):
        for client in self.clients.values():
            client.close()
        self.server.close()


@pytest.fixture
def job(tmp_path):
    made = Job(tmp_path)
    yield made
    made.close()


def test_a_rollout_puts_and_a_data_rank_takes(job):
    job.put("rollout", b"record")
    assert [bytes(parts[0]) for _, parts in job.take("actor")] == [b"record"]


def test_an_env_takes_no_trajectory_changes_it_and_puts_it_back(job):
    job.put("rollout", b"record")
    with pytest.raises(ConfigError, match="group env does not permit to take on channel 'trajectories'"):
        job.take("env")
    with pytest.raises(ConfigError, match="group env does not permit to put on channel 'trajectories'"):
        job.put("env", b"record with other rewards")
    with pytest.raises(ConfigError, match="does not permit to put"):
        job.call("env", "reserve", "trajectories", "k", [8], 5.0, False, [True])
    with pytest.raises(ConfigError, match="does not permit to put"):
        job.call("env", "allocate", "trajectories", 8)
    assert [bytes(parts[0]) for _, parts in job.take("actor")] == [b"record"]


def test_a_rollout_takes_no_trajectory_of_another(job):
    job.put("rollout", b"record")
    with pytest.raises(ConfigError, match="group rollout does not permit to take"):
        job.take("rollout")


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("confirm", ({"trajectories": ["0-0"]},)),
        ("requeue", ("trajectories", ["0-0"])),
        ("take", ("other", "k", *TAKE[:-1], {"trajectories": ["0-0"]})),
    ],
    ids=["confirms", "gives back", "confirms with a take"],
)
def test_an_env_ends_no_delivery_of_another_process(job, method, args):
    with pytest.raises(ConfigError, match="does not permit to take on channel 'trajectories'"):
        job.call("env", method, *args)


@pytest.mark.parametrize("role", ["env", "rollout", "actor"])
def test_a_channel_of_the_program_is_created_by_the_runner_alone(job, role):
    with pytest.raises(ConfigError, match="'validation' must be created by the runner"):
        job.call(role, "create", "validation", ChannelOptions(maxsize=1))


def test_room_that_was_granted_to_one_process_is_filled_and_given_up_by_no_other(job):
    room = job.call("rollout", "reserve", "trajectories", "k", [6], 5.0, False, [True])
    with pytest.raises(InfrastructureError, match="reservation of this item was given up"):
        job.call("env", "hand_over", room.ticket, 0.0, [b"forged"])
    job.call("env", "abort", room.ticket)
    job.call("rollout", "hand_over", room.ticket, 0.0, [b"record"])
    assert [bytes(parts[0]) for _, parts in job.take("actor")] == [b"record"]


def test_a_channel_that_no_group_names_is_open_to_all(job):
    job.call("env", "create", "notes", ChannelOptions())
    job.call("env", "put", "notes", "k", 0.0, [b"note"], 5.0, False)
    assert [bytes(parts[0]) for _, parts in job.call("rollout", "take", "notes", "k", *TAKE)] == [b"note"]


def test_a_group_sends_as_its_own_members_only_and_takes_their_messages_only(job):
    job.call("env", "create", WORKER_MESSAGES, ChannelOptions())
    key = ("rollout:0", "actor:0")

    def put(role, key):
        job.call(role, "put", WORKER_MESSAGES, key, 0.0, [b"message"], 5.0, False)

    put("rollout", key)
    for method, args in (("put", (0.0, [b"forged"], 5.0, False)), ("reserve", ([8], 5.0, False)), ("take", TAKE)):
        with pytest.raises(
            ConfigError, match="group env permits to .* of its own members only, got rollout:0 to actor:0"
        ):
            job.call("env", method, WORKER_MESSAGES, key, *args)
    with pytest.raises(ConfigError, match="group actor permits to put messages of its own members only"):
        put("actor", key)
    put("env", ("env:3", "actor:0", "a transfer"))
    for role in ("actor", "rollout"):  # for its member, and back from where it was sent to
        put("rollout", key)
        assert len(job.call(role, "take", WORKER_MESSAGES, key, *TAKE)) == 1
    job.call("env", "create", "other", ChannelOptions())
    job.call("env", "put", "other", "k", 0.0, [b"item"], 5.0, False)
    assert len(job.call("env", "take", "other", "k", *TAKE[:-1], {WORKER_MESSAGES: []})) == 1
