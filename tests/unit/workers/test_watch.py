"""Which process of a member is watched, and when it counts as lost."""

import pytest

from rl_core.messages.members import MemberState, MemberView, View
from rl_core.workers import message_channel
from rl_core.workers.context import WorkerContext
from rl_core.workers.message_channel import Watch


@pytest.fixture
def context():
    return WorkerContext()


def see(context, state, incarnation=(0, 0)):
    fields = {"role": "b", "group": "b", "rank": 1, "pod": "p", "address": "tcp://127.0.0.1:1", "pid": 1}
    member = MemberView(name="b:1", host_token="", incarnation=incarnation, state=MemberState(state), **fields)
    context.update_view(View(version=1, members=[member]))


def test_the_present_process_is_lost_when_it_is_gone_or_was_replaced(context):
    see(context, "ready")
    gone, replaced = Watch.present(context, "b:1"), Watch.present(context, "b:1")
    assert not gone.lost
    see(context, "lost")
    assert gone.lost
    see(context, "joining", (0, 1))
    assert replaced.lost and not Watch.present(context, "b:1").lost


def test_a_process_that_was_not_known_is_watched_from_when_it_is_seen(context):
    watch = Watch.present(context, "b:1")
    assert not watch.lost
    see(context, "ready")
    assert not watch.lost
    see(context, "joining", (0, 1))
    assert watch.lost


def test_after_a_loss_the_replacement_has_some_time_to_be_seen(context, monkeypatch):
    see(context, "lost")
    watch = Watch.present(context, "b:1")
    assert not watch.lost
    monkeypatch.setattr(message_channel, "REFRESH_SECONDS", 0.0)
    assert watch.lost
    see(context, "ready", (0, 1))
    assert not watch.lost


def test_a_process_that_the_heartbeats_do_not_show_yet_is_not_lost(context):
    see(context, "lost", (0, 0))
    assert not Watch(context, "b:1", (0, 1)).lost


def test_members_know_the_size_of_their_own_group_without_seeing_it(context):
    assert context.world_size_of(context.identity.group) == context.identity.world_size == 1
    assert context.world_size_of("b") == 0
