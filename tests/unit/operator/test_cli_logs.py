"""`rljob logs`: whose logs it shows, also where rollouts live in the pods of actors and others add containers."""

import pytest

from rl_core.api.errors import ConfigError
from rljob_operator.cli import logs
from tests.unit.operator.test_manifests_support import colocated_pods


class Cluster:
    """A job's pods, in place of a Connection: the log of each container is one line, its pod and name."""

    namespace = "team"

    def __init__(self, pods):
        for pod in pods:
            pod["spec"]["containers"].insert(
                0, {"name": "istio-proxy", "image": "mesh", "env": [{"name": "RLJOB_POD_PLAN_OF"}]}
            )
        self._pods = pods

    def read(self, kind, name):
        return {}

    def list(self, kind, *, selector):
        return self._pods

    def lines(self, path, *, query):
        return iter([f"{path.split('/')[-2]}/{query['container']}"])


def shown(cluster, **chosen):
    found = []
    logs.show(
        cluster, "sums", **{"role": None, "index": None, "attempt": None, "follow": False} | chosen, write=found.append
    )
    return sorted(line.rstrip() for line in found)


@pytest.mark.parametrize("follow", [False, True])
def test_a_rollout_in_a_container_of_its_actors_pod_is_found_and_sidecars_are_left_out(follow):
    cluster = Cluster(list(colocated_pods("containers", "dra").values()))
    rollouts = ["rollout-0: sums-actor-0/rollout", "rollout-1: sums-actor-1/rollout"]
    actors = ["actor-0: sums-actor-0/actor", "actor-1: sums-actor-1/actor"]
    assert shown(cluster, role="rollout", follow=follow) == rollouts
    assert shown(cluster, role="actor", index=1, follow=follow) == actors[1:]
    assert shown(cluster, follow=follow) == actors + rollouts


def test_a_rollout_that_shares_the_container_of_an_actor_is_found():
    cluster = Cluster(list(colocated_pods("processes", "devicePlugin").values()))
    assert shown(cluster, role="rollout", index=0) == ["actor-0: sums-actor-0/actor"]


def test_a_role_without_containers_names_those_that_there_are():
    cluster = Cluster(list(colocated_pods("containers", "dra").values()))
    with pytest.raises(ConfigError, match="role judge.*pods: actor-0, actor-1, rollout-0, rollout-1"):
        shown(cluster, role="judge")
