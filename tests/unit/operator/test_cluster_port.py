"""The API port against a real HTTP server: refusals by meaning, Retry-After honoured, retries bounded, pages followed."""

import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio import client

from rljob_operator import errors, kinds
from rljob_operator.runtime.cluster import ATTEMPTS, LONGEST_PAUSE, ApiCluster


class Server:
    """Answers with what it is told, and keeps what it was asked."""

    def __init__(self):
        self.answers, self.requests = [], []

    async def handle(self, request):
        self.requests.append((request.method, request.path_qs, request.headers, await request.text()))
        status, body, headers = self.answers.pop(0) if self.answers else (200, {}, {})
        return web.json_response(body, status=status, headers=headers)


@pytest.fixture
async def server():
    application, stand_in = web.Application(), Server()
    application.router.add_route("*", "/{path:.*}", stand_in.handle)
    async with TestServer(application) as running:
        stand_in.url = str(running.make_url("")).rstrip("/")
        yield stand_in


@pytest.fixture
async def bench(server):
    configuration = client.Configuration(host=server.url)
    configuration.api_key["BearerToken"] = "bearer secret"
    slept, seen = [], []

    async def sleep(seconds):
        slept.append(seconds)

    async with client.ApiClient(configuration) as api:
        cluster = ApiCluster(api, observe=lambda *words: seen.append(words[:3]), sleep=sleep)
        cluster.slept, cluster.seen = slept, seen
        yield cluster


def refusal(code, reason="", **details):
    return (code, {"kind": "Status", "message": f"words of {code}", "reason": reason, "details": details}, {})


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (refusal(400), errors.Invalid),
        (refusal(403), errors.Forbidden),
        (refusal(404), errors.NotFound),
        (refusal(409), errors.Conflict),
        (refusal(409, "AlreadyExists"), errors.AlreadyExists),
        (refusal(410), errors.Expired),
        (refusal(422), errors.Invalid),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_a_refusal_is_raised_by_its_meaning_with_the_servers_words(bench, server, answer, expected):
    server.answers = [answer]
    with pytest.raises(expected, match=f"words of {answer[0]}") as caught:
        await bench.read(kinds.POD, "ns", "x")
    assert type(caught.value) is expected
    assert len(server.requests) == 1, "what will not pass is not repeated"


@pytest.mark.parametrize("code", [500, 502, 503, 429, 401])
async def test_what_passes_is_repeated_a_bounded_number_of_times(bench, server, code):
    server.answers = [refusal(code)] * 100
    with pytest.raises((errors.Unavailable, errors.TooManyRequests)):
        await bench.read(kinds.POD, "ns", "x")
    assert len(server.requests) == ATTEMPTS
    assert bench.seen == [("GET", "pods", str(code))] * ATTEMPTS


async def test_the_server_says_how_long_to_wait(bench, server):
    server.answers = [(429, {}, {"Retry-After": "3"}), refusal(503, retryAfterSeconds=4), (200, {"metadata": {}}, {})]
    await bench.read(kinds.POD, "ns", "x")
    assert bench.slept == [3.0, 4.0]


async def test_no_pause_is_longer_than_the_limit(bench, server):
    server.answers = [(429, {}, {"Retry-After": "3600"})]
    await bench.read(kinds.POD, "ns", "x")
    assert bench.slept == [LONGEST_PAUSE]


async def test_a_server_that_is_not_there_is_unavailable(bench, server):
    bench._api.configuration.host = "http://127.0.0.1:1"
    with pytest.raises(errors.Unavailable):
        await bench.read(kinds.POD, "ns", "x")
    assert len(bench.slept) == ATTEMPTS - 1


async def test_a_proxys_page_is_its_own_message(bench, server):
    server.answers = [(404, "plain words", {})]
    with pytest.raises(errors.NotFound, match="plain words"):
        await bench.read(kinds.POD, "ns", "x")


async def test_lists_follow_their_pages_and_items_say_what_they_are(bench, server):
    item = {"metadata": {"name": "a"}}
    server.answers = [
        (200, {"metadata": {"continue": "more=="}, "items": [item]}, {}),
        (200, {"metadata": {}, "items": [item]}, {}),
    ]
    pages = [page async for page in bench.list(kinds.NETWORK_POLICY, None, selector="rljob.dev/job")]
    assert [len(page) for page in pages] == [1, 1]
    assert pages[0][0]["kind"] == "NetworkPolicy" and pages[0][0]["apiVersion"] == "networking.k8s.io/v1"
    first, second = (path for _, path, _, _ in server.requests)
    assert first == "/apis/networking.k8s.io/v1/networkpolicies?limit=500&labelSelector=rljob.dev/job"
    assert second.endswith("continue=more%3D%3D")


async def test_deletions_carry_the_uid(bench, server):
    await bench.delete(kinds.POD, "ns", "x", uid="u-1", grace_seconds=0)
    method, path, _, body = server.requests[0]
    assert (method, path) == ("DELETE", "/api/v1/namespaces/ns/pods/x")
    assert json.loads(body) == {
        "preconditions": {"uid": "u-1"},
        "propagationPolicy": "Background",
        "gracePeriodSeconds": 0,
    }


async def test_writes_speak_their_dialects(bench, server):
    await bench.apply(kinds.SERVICE, "ns", "x", {"kind": "Service"})
    await bench.patch(kinds.RLJOB, "ns", "x", {"status": {}}, subresource="status")
    await bench.create(kinds.POD, "ns", {"kind": "Pod"})
    kinds_of_body = [headers["Content-Type"] for _, _, headers, _ in server.requests]
    assert kinds_of_body == ["application/apply-patch+yaml", "application/merge-patch+json", "application/json"]
    assert server.requests[0][1].endswith("services/x?fieldManager=rljob-operator&force=true")
    assert server.requests[1][1] == "/apis/rljob.dev/v1alpha1/namespaces/ns/rljobs/x/status?fieldManager=rljob-operator"
    assert {headers["Authorization"] for _, _, headers, _ in server.requests} == {"bearer secret"}
