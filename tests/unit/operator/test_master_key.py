"""The master key is made once, agreed on by replicas, and never replaced."""

import base64

import pytest

from rljob_operator import kinds
from rljob_operator.errors import NotFound
from rljob_operator.runtime import master_key
from rljob_operator.runtime.master_key import MasterKeyError, obtain


async def test_it_is_made_on_first_use_and_then_the_same(cluster):
    first = await obtain(cluster, namespace="sys")
    assert len(first) == 32
    assert await obtain(cluster, namespace="sys") == first


async def test_the_second_of_two_that_start_together_takes_the_firsts(cluster):
    first = await obtain(cluster, namespace="sys")
    cluster.fail("read", master_key.NAME, NotFound("not yet"))
    assert await obtain(cluster, namespace="sys") == first


@pytest.mark.parametrize("text", ["", "!!", base64.b64encode(b"short").decode()], ids=["empty", "no base64", "short"])
async def test_a_broken_key_is_refused_and_not_replaced(cluster, text):
    cluster.put(kinds.SECRET, "sys", {"metadata": {"name": master_key.NAME}, "data": {"master": text}})
    with pytest.raises(MasterKeyError, match="must be 32 bytes"):
        await obtain(cluster, namespace="sys")
    assert cluster.objects["Secret", "sys", master_key.NAME]["data"] == {"master": text}
