"""A local run follows the number of its rollouts and envs: highest index first, nothing twice."""

from rl_core.launch.scaling import PodChanges, follow


def member(name, state="serving"):
    role, _, index = name.partition(":")
    return {"name": name, "role": role, "index": int(index), "pod": f"j-{role}-{index}", "state": state}


def status(members, *, rollouts, missing=()):
    return {
        "members": [member("actor:0", "ready"), *members],
        "roles": [{"name": "actor", "desired": 1}, {"name": "rollout", "desired": rollouts}],
        "missing": [{"pod": pod, "role": pod.split("-")[1]} for pod in missing],
    }


def test_missing_members_without_a_pod_are_started_and_those_with_one_are_left_to_the_restart_rules():
    reported = status(
        [member("rollout:0")], rollouts=4, missing=["j-rollout-1", "j-rollout-2", "j-rollout-3", "j-actor-0"]
    )
    assert follow(
        reported, {"j-rollout-0": True, "j-rollout-1": True, "j-rollout-3": False}, draining=()
    ) == PodChanges(start=("j-rollout-2", "j-rollout-3"))


def test_surplus_pods_drain_highest_index_first_and_draining_ones_are_not_counted():
    members = [member("rollout:0"), member("rollout:1"), member("rollout:2"), member("rollout:3", "draining")]
    pods = {f"j-rollout-{index}": True for index in range(4)}
    assert follow(status(members, rollouts=1), pods, draining=()).drain == ("j-rollout-2", "j-rollout-1")
    assert follow(status(members, rollouts=3), pods, draining=()).drain == ()


def test_a_drained_pod_is_ended_once():
    reported = status([member("rollout:0"), member("rollout:1", "drained")], rollouts=1)
    draining = ["j-rollout-1"]
    assert follow(reported, {"j-rollout-0": True, "j-rollout-1": True}, draining=draining) == PodChanges(
        end=("j-rollout-1",)
    )
    assert follow(reported, {"j-rollout-0": True, "j-rollout-1": False}, draining=draining) == PodChanges()


def test_the_successor_of_a_member_that_somebody_else_ended_is_left_alone_before_it_registers():
    reported = status([member("rollout:0", "drained")], rollouts=1, missing=["j-rollout-0"])
    assert follow(reported, {"j-rollout-0": True}, draining=()) == PodChanges()


def test_a_pod_of_several_members_starts_drains_and_ends_once_when_all_of_them_have_drained():
    def of_pod(pod, *states):
        return [member(f"rollout:{2 * pod + n}", state) | {"pod": f"j-rollout-{pod}"} for n, state in enumerate(states)]

    pods = {"j-rollout-0": True, "j-rollout-1": True}
    reported = status(of_pod(0, "serving", "serving"), rollouts=4, missing=["j-rollout-1", "j-rollout-1"])
    assert follow(reported, {"j-rollout-0": True}, draining=()) == PodChanges(start=("j-rollout-1",))
    serving = of_pod(0, "serving", "serving")
    assert follow(status([*serving, *of_pod(1, "serving", "serving")], rollouts=2), pods, draining=()).drain == (
        "j-rollout-1",
    )
    assert follow(status([*serving, *of_pod(1, "drained", "draining")], rollouts=2), pods, draining=()) == PodChanges()
    assert follow(
        status([*serving, *of_pod(1, "drained", "drained")], rollouts=2), pods, draining=["j-rollout-1"]
    ).end == ("j-rollout-1",)


def test_a_status_without_members_moves_nothing():
    assert follow({}, {"j-rollout-0": True}, draining=()) == PodChanges()
