"""The master key is made once, agreed on by replicas, never made anew while jobs have keys of it, and changed without losing theirs."""

import base64

import pytest

from rljob_operator import kinds
from rljob_operator.errors import NotFound
from rljob_operator.runtime import master_key
from rljob_operator.runtime.master_key import KeyRing, MasterKeyError, UnknownKey, key_id, obtain

OLD, NEW = b"o" * 32, b"n" * 32


def text(key):
    return base64.b64encode(key).decode()


def job(*, manager=None, **status):
    return {"metadata": {"namespace": "team", "name": "x"}, "spec": {"managedBy": manager}, "status": status}


async def test_it_is_made_on_first_use_and_then_the_same(cluster):
    first = await obtain(cluster, namespace="sys")
    assert len(first.of(None)) == 32
    again = await obtain(cluster, namespace="sys", jobs=[job(epoch=1, phase="Running")])
    assert (again.newest, again.of(None)) == (first.newest, first.of(None))


async def test_the_second_of_two_that_start_together_takes_the_firsts(cluster):
    first = await obtain(cluster, namespace="sys")
    cluster.fail("read", master_key.NAME, NotFound("not yet"))
    assert (await obtain(cluster, namespace="sys")).newest == first.newest


@pytest.mark.parametrize("phase", ["Pending", "Running", "Suspended"])
async def test_a_lost_key_is_not_made_anew_while_a_job_has_keys_of_it(cluster, phase):
    with pytest.raises(
        MasterKeyError, match=r"sys/rljob-operator-master-key must be there, as 1 jobs have keys .*team/x.*restore it"
    ):
        await obtain(cluster, namespace="sys", jobs=[job(), job(epoch=2, phase=phase)])
    assert cluster.of(kinds.SECRET) == []


@pytest.mark.parametrize(
    "harmless",
    [
        job(),
        job(phase="Pending"),
        job(epoch=3, phase="Failed"),
        job(manager="someone.else/x", epoch=1, phase="Running"),
    ],
    ids=["new", "not started", "ended", "of another manager"],
)
async def test_a_job_without_keys_in_use_does_not_stand_in_the_way_of_the_first_key(cluster, harmless):
    await obtain(cluster, namespace="sys", jobs=[harmless])
    assert cluster.of(kinds.SECRET) == [master_key.NAME]


async def test_after_a_change_each_job_keeps_the_key_it_was_accepted_under(cluster):
    data = {"master": text(NEW), "before": text(OLD)}
    cluster.put(kinds.SECRET, "sys", {"metadata": {"name": master_key.NAME}, "data": data})
    ring = await obtain(cluster, namespace="sys", jobs=[job(epoch=1, phase="Running")])
    assert ring.newest == key_id(NEW) != key_id(OLD)
    assert ring.of(job(keyId=key_id(OLD))) == OLD
    assert ring.of(job(keyId=key_id(NEW))) == ring.of(job()) == ring.of({}) == ring.of(None) == NEW


def test_a_job_whose_key_is_not_there_gets_no_other():
    with pytest.raises(UnknownKey, match=f"made from master key {key_id(OLD)}, which .* does not hold"):
        KeyRing(NEW).of(job(keyId=key_id(OLD)))


@pytest.mark.parametrize("entry", ["master", "before"])
@pytest.mark.parametrize("broken", ["", "!!", text(b"short")], ids=["empty", "no base64", "short"])
async def test_a_broken_key_is_refused_and_not_replaced(cluster, broken, entry):
    data = {"master": text(NEW), entry: broken}
    cluster.put(kinds.SECRET, "sys", {"metadata": {"name": master_key.NAME}, "data": data})
    with pytest.raises(MasterKeyError, match=rf"data\.{entry} must be 32 bytes"):
        await obtain(cluster, namespace="sys")
    assert cluster.objects["Secret", "sys", master_key.NAME]["data"] == data
