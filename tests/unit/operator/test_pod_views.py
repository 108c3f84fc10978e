"""Pods as a kubelet, a scheduler and a node controller leave them, read into views; and text that is no time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_operator.reconcile.pod_views import pod_view
from rljob_operator.times import to_seconds, to_text


def pod(status: dict[str, Any], **meta: Any) -> dict[str, Any]:
    labels = {"rljob.dev/role": "actor", "rljob.dev/index": "1", "rljob.dev/epoch": "3"}
    owner = [{"kind": "RLJob", "uid": "j"}]
    return {
        "metadata": {"name": "x-actor-1", "uid": "u", "labels": labels, "ownerReferences": owner, **meta},
        "spec": {"nodeName": "n"},
        "status": status,
    }


def condition(kind: str, status: str, reason: str = "", message: str = "") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def test_labels_owner_and_places_are_read() -> None:
    view = pod_view(
        pod(
            {
                "phase": "Running",
                "podIP": "10.1.2.3",
                "startTime": "2026-01-01T00:00:00Z",
                "conditions": [condition("Ready", "True")],
            }
        )
    )
    assert (view.name, view.uid, view.job_uid, view.role, view.index, view.epoch) == (
        "x-actor-1",
        "u",
        "j",
        "actor",
        1,
        3,
    )
    assert (view.node, view.ip, view.ready, view.acknowledged, view.node_lost) == ("n", "10.1.2.3", True, True, False)


@pytest.mark.parametrize(
    ("ready", "lost"),
    [
        (condition("Ready", "False", "ContainersNotReady"), False),
        (condition("Ready", "False", "PodCompleted"), False),
        (condition("Ready", "False", ""), True),
        (condition("Ready", "False", "NodeNotReady"), True),
        (condition("Ready", "True"), False),
    ],
)
def test_a_node_controllers_word_is_told_from_a_kubelets(ready: dict[str, str], lost: bool) -> None:
    assert pod_view(pod({"conditions": [ready]})).node_lost is lost


@pytest.mark.parametrize(
    ("deleted", "reason", "seen", "lost"),
    [
        (True, "DeletionByTaintManager", None, True),
        (True, "", 1, True),
        (True, "EvictionByEvictionAPI", 2, False),
        (True, "", None, False),
        (False, "", 1, False),
    ],
    ids=["evicted by taint", "deletion not seen", "deletion seen", "not told", "not deleted"],
)
def test_a_pod_that_was_not_ready_when_its_node_died_is_lost_all_the_same(
    deleted: bool, reason: str, seen: int | None, lost: bool
) -> None:
    """The node controller leaves a Ready condition that is false already as it is, with the kubelet's reason."""
    conditions = [condition("Ready", "False", "ContainersNotReady"), condition("DisruptionTarget", "True", reason)]
    meta = {"generation": 2} | ({"deletionTimestamp": "2026-01-01T00:00:30Z"} if deleted else {})
    status = {"conditions": conditions} | ({} if seen is None else {"observedGeneration": seen})
    assert pod_view(pod(status, **meta)).node_lost is lost


@pytest.mark.parametrize(
    ("finished", "alive"),
    [("2026-01-01T00:00:01Z", True), (None, True), ("2025-12-31T23:59:40Z", False)],
    ids=["ended because of it", "end not seen", "ended before"],
)
def test_a_pod_deleted_while_it_ran_is_told_from_one_that_had_ended(finished: str | None, alive: bool) -> None:
    ended = {"exitCode": 3} | ({"finishedAt": finished} if finished else {})
    meta = {"deletionTimestamp": "2026-01-01T00:00:30Z", "deletionGracePeriodSeconds": 30}
    status = {"containerStatuses": [{"name": "actor", "state": {"terminated": ended}}]}
    assert pod_view(pod(status, **meta)).deleted_alive is alive
    assert not pod_view(pod(status)).deleted_alive


def test_the_init_container_that_runs_is_read() -> None:
    done, runs = {"terminated": {"exitCode": 0}}, {"running": {"startedAt": "2026-11-21T12:00:00Z"}}
    statuses = [{"name": "fetch", "state": done}, {"name": "prepare", "state": runs}, {"name": "last", "state": {}}]
    assert pod_view(pod({"initContainerStatuses": statuses})).preparing == "prepare"
    assert pod_view(pod({"initContainerStatuses": statuses[:1]})).preparing == ""


def test_the_schedulers_words_a_disruption_and_a_waiting_container_are_read() -> None:
    view = pod_view(
        pod(
            {
                "conditions": [
                    condition("PodScheduled", "False", "Unschedulable", "0/3 nodes are available"),
                    condition("DisruptionTarget", "True", "PreemptionByScheduler"),
                ],
                "containerStatuses": [
                    {"name": "actor", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such host"}}}
                ],
            }
        )
    )
    assert view.unschedulable == "0/3 nodes are available" and view.disrupted == "PreemptionByScheduler"
    assert view.waiting == "ErrImagePull: no such host" and view.conditions == ("DisruptionTarget",)


@pytest.mark.parametrize("reason", ["PodInitializing", "ContainerCreating"])
def test_a_container_that_is_about_to_start_is_no_trouble(reason: str) -> None:
    assert pod_view(pod({"containerStatuses": [{"name": "c", "state": {"waiting": {"reason": reason}}}]})).waiting == ""


def test_an_init_container_is_an_end_only_when_it_failed() -> None:
    def view(code: int) -> Any:
        return pod_view(
            pod({"initContainerStatuses": [{"name": "fetch", "state": {"terminated": {"exitCode": code}}}]})
        )

    assert view(0).ended == () and [(end.name, end.exit_code, end.init) for end in view(6).ended] == [
        ("fetch", 6, True)
    ]


@pytest.mark.parametrize(
    "state",
    [{"running": {}}, {"terminated": {"exitCode": 143}}],
    ids=["runs beside the others", "was stopped at the end"],
)
def test_a_sidecar_neither_prepares_nor_ends_a_pod(state: dict[str, Any]) -> None:
    made = pod({"initContainerStatuses": [{"name": "logs", "state": state}]})
    made["spec"] = {"initContainers": [{"name": "logs", "restartPolicy": "Always"}]}
    assert (pod_view(made).preparing, pod_view(made).ended) == ("", ())


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=8,
)
fields = st.sampled_from(
    [
        "metadata",
        "spec",
        "status",
        "conditions",
        "containerStatuses",
        "state",
        "terminated",
        "labels",
        "ownerReferences",
        "deletionTimestamp",
    ]
)


@given(st.dictionaries(fields, st.one_of(json_values, st.dictionaries(fields, json_values))))
def test_any_json_is_a_pod_of_some_kind(value: dict[str, Any]) -> None:
    pod_view(value)


@given(st.integers(0, 4_000_000_000))
def test_times_go_both_ways(seconds: int) -> None:
    assert to_seconds(to_text(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1970-01-01T00:00:10.5Z", 10.5), ("1970-01-01T01:00:00+01:00", 0.0), ("soon", None), (5, None), (None, None)],
)
def test_times_are_read_as_the_api_server_and_the_runner_write_them(text: Any, seconds: float | None) -> None:
    assert to_seconds(text) == seconds
