"""kopf is used for its watches alone: no handler that writes, no setting that writes, every event into the cache."""

import asyncio
import inspect

import kopf
import pytest
from kubernetes.aio.client import Configuration

from rljob_operator import kinds
from rljob_operator.runtime import handlers
from rljob_operator.runtime.cache import Cache, JobKey
from rljob_operator.runtime.handlers import BURST_SECONDS


async def nowhere():
    return Configuration(host="https://api")


@pytest.fixture
def bench():
    class Bench:
        cache, enqueued, suspected, counted = Cache(), [], [], []

    Bench.watches = handlers.Watches(
        cache=Bench.cache,
        enqueue=lambda key, after: Bench.enqueued.append((key, after)),
        suspect=Bench.suspected.append,
        count=lambda plural, anew: Bench.counted.append((plural, anew)),
    )
    return Bench


def pod(version="1", phase="Pending"):
    meta = {
        "name": "x-env-0",
        "namespace": "ns",
        "uid": "u",
        "resourceVersion": version,
        "labels": {"rljob.dev/job": "x"},
    }
    return {"kind": "Pod", "metadata": meta, "status": {"phase": phase}}


def test_only_event_handlers_are_registered_and_all_are_coroutines(bench):
    registry = handlers.registry(bench.watches, kinds=kinds.WATCHED, configuration=nowhere)
    watching = registry._watching.get_all_handlers()
    assert {handler.id for handler in watching} == {kind.plural for kind in kinds.WATCHED}
    for section in (registry._changing, registry._spawning, registry._indexing, registry._webhooks):
        assert not section.get_all_handlers()
    assert all(
        inspect.iscoroutinefunction(handler.fn) for handler in (*watching, *registry._activities.get_all_handlers())
    )


def test_the_settings_write_nothing_and_wait_for_nothing_long():
    settings = handlers.settings(kinds=kinds.WATCHED, initial_streaming=True)
    assert settings.peering.standalone and not settings.posting.enabled and settings.scanning.disabled
    assert (settings.networking.request_timeout, settings.networking.connect_timeout) == (30.0, 10.0)
    assert settings.watching.server_timeout == 600 and settings.watching.inactivity_timeout == 70.0
    assert settings.watching.initial_streaming and settings.watching.chunk_size


def test_children_are_selected_by_the_server_and_jobs_are_not():
    selectors = handlers.settings(kinds=kinds.WATCHED, initial_streaming=False).watching.label_selectors

    def resource(kind):
        return kopf.Resource(
            group=kind.group, version=kind.version, plural=kind.plural, kind=kind.kind, namespaced=True, preferred=True
        )

    assert all(list(selectors.collect(resource(kind))) == ["rljob.dev/job"] for kind in kinds.OWNED)
    assert list(selectors.collect(resource(kinds.RLJOB))) == []


def test_events_reach_cache_and_queue_when_they_change_something(bench):
    key = JobKey("ns", "x")
    bench.watches.take(kinds.POD, "ADDED", pod())
    bench.watches.take(kinds.POD, "MODIFIED", pod())
    assert bench.enqueued == [(key, BURST_SECONDS)]
    assert len(bench.cache.children(kinds.POD, key)) == 1
    bench.watches.take(kinds.POD, "DELETED", pod("2"))
    assert bench.enqueued[1:] == [(key, 0.0)], "what is gone is replaced at once"
    assert bench.cache.children(kinds.POD, key) == []


def test_a_change_of_the_job_is_looked_at_at_once(bench):
    job = {"metadata": {"name": "x", "namespace": "ns", "uid": "j", "resourceVersion": "1"}}
    bench.watches.take(kinds.RLJOB, "ADDED", job)
    assert bench.enqueued == [(JobKey("ns", "x"), 0.0)]


def test_events_without_a_type_say_that_a_watch_began_anew(bench):
    bench.watches.take(kinds.POD, None, pod("1"))
    bench.watches.take(kinds.POD, None, pod("2"))
    bench.watches.take(kinds.POD, "MODIFIED", pod("3"))
    bench.watches.take(kinds.POD, None, pod("4"))
    assert bench.suspected == [kinds.POD] * 3
    assert bench.counted == [("pods", True), ("pods", False), ("pods", False), ("pods", True)]


@pytest.mark.parametrize(
    ("token", "expected"),
    [("bearer abc", ("bearer", "abc")), ("Bearer abc", ("Bearer", "abc"))],
    ids=["service account", "kubeconfig"],
)
def test_both_clients_speak_as_the_same_user(token, expected):
    configuration = Configuration(host="https://api")
    configuration.api_key["BearerToken"] = token
    got = handlers.connection(configuration)
    assert got.as_http_headers() == {"Authorization": " ".join(("Bearer", expected[1]))} or got.as_http_headers() == {
        "Authorization": " ".join(expected)
    }


def test_a_client_certificate_is_passed_on():
    configuration = Configuration(host="https://api")
    configuration.cert_file, configuration.key_file, configuration.ssl_ca_cert = "c", "k", "ca"
    got = handlers.connection(configuration)
    assert (got.certificate_path, got.private_key_path, got.ca_path, got.token) == ("c", "k", "ca", None)


def test_the_essence_of_an_object_is_not_computed():
    body = kopf.Body({"metadata": {"name": "x"}, "spec": {"deep": [1]}})
    assert handlers.NoDiffs().build(body=body) == {}
    assert handlers.NoDiffs().fetch(body=body) is None


async def test_events_of_one_object_come_in_order(bench):
    registry = handlers.registry(bench.watches, kinds=[kinds.POD], configuration=nowhere)
    (handler,) = registry._watching.get_all_handlers()
    for version in ("1", "2", "3"):
        await handler.fn(event={"type": "MODIFIED", "object": pod(version, phase=version)}, memo=None)
    await asyncio.sleep(0)
    assert [obj["status"]["phase"] for obj in bench.cache.children(kinds.POD, JobKey("ns", "x"))] == ["3"]
