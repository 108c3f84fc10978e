"""Bad jobs are refused by the API server with field, rule, value and way out; pydantic gives the same verdict in the same words."""

import json

import kubernetes
import pytest
from pydantic import ValidationError

from rl_core.api.backends import EMBODIED_PROGRAMS
from rl_core.api.job import RLJob
from rl_core.cli.problems import find_problems
from tests.cluster.bad_jobs import CASES, GOOD, merged


def judged(access, document) -> list[tuple[str, str]]:
    """Return the API server's findings on a document as (field, message); empty = it would be taken."""
    try:
        access.custom.create_namespaced_custom_object(
            "rljob.dev", "v1alpha1", "default", "rljobs", document, dry_run="All", field_validation="Strict"
        )
    except kubernetes.client.ApiException as error:
        answer = json.loads(error.body)
        causes = answer.get("details", {}).get("causes") or [{"field": "", "message": answer["message"]}]
        return [(cause.get("field", ""), cause["message"]) for cause in causes]
    return []


@pytest.mark.parametrize("case", CASES)
def test_a_bad_job_is_refused_with_field_rule_value_and_way_out(control_plane, case):
    change, field, message, same_words = CASES[case]
    document = merged(GOOD, {"spec": change})
    found = judged(control_plane, document)
    assert any(where == field and said.endswith(message) for where, said in found), found
    with pytest.raises(ValidationError) as refusal:
        RLJob.model_validate(document)
    if same_words:
        assert any(message in detail["msg"] for detail in refusal.value.errors()), refusal.value


def test_kubectl_shows_field_and_message_of_each_problem(control_plane):
    change = {"algorithm": {"groupSize": 1}, "rollout": {"minReplicas": 3}, "actor": {"env": {"RANK": "0"}}}
    text = json.dumps(merged(GOOD, {"spec": change}))
    answer = control_plane.kubectl("create", "--dry-run=server", "-f", "-", stdin=text, check=False)
    assert answer.returncode == 1
    for name in ("group-of-one", "identity-variable"):
        _, field, message, _ = CASES[name]
        assert f"* {field}: Invalid value: {message}" in answer.stderr
    assert answer.stderr.count("\n* ") == 3


@pytest.mark.parametrize("name", ["a" * 41, "Capital", "1st", "under_score", "ends-", "do.t"])
def test_a_name_that_pods_cannot_carry_is_refused_in_the_same_words(control_plane, name):
    document = merged(GOOD, {"metadata": {"name": name}})
    said = " ".join(message for _, message in judged(control_plane, document))
    with pytest.raises(ValidationError) as refusal:
        RLJob.model_validate(document)
    words = f"name must be a DNS-1123 label of at most 40 characters (a-z, 0-9, -; a letter first), got {name}; rename the job"
    assert words in str(refusal.value)
    assert words in said or "must consist of lower case" in said  # Kubernetes' own rule speaks first


@pytest.mark.parametrize(
    "algorithm",
    [{"loss": {"name": "mine:loss", "dualClip": 3.0}}, {"name": "reinforce_plus_plus_mine:f", "whiten": True}],
)
def test_rules_of_built_in_names_do_not_meet_functions_of_the_user(control_plane, algorithm):
    document = merged(GOOD, {"spec": {"algorithm": algorithm}})
    assert judged(control_plane, document) == []
    assert RLJob.model_validate(document).spec.algorithm


@pytest.mark.parametrize(
    "spec",
    [
        {"env": {"type": "mine:Game", "maxTurns": 4}},
        {"env": {"type": "of_an_extension", "maxTurns": 4}, "extensions": ["mine"]},
        {"env": {"type": "agent", "agent": "mine:play", "maxTurns": 4}},
    ],
    ids=["of the user", "of an extension", "agent"],
)
def test_environments_of_the_user_are_taken_with_several_turns(control_plane, spec):
    document = merged(GOOD, {"spec": spec})
    assert judged(control_plane, document) == []
    assert RLJob.model_validate(document).spec.env.max_turns == 4


@pytest.mark.parametrize("program", EMBODIED_PROGRAMS)
def test_batches_of_simulators_need_not_divide_prompts(control_plane, program):
    spec = {"algorithm": {"optimizerStepsPerBatch": 5}, "actor": {"processesPerPod": 3}}
    document = merged(GOOD, {"spec": spec | {"program": program}})
    assert judged(control_plane, document) == []
    assert RLJob.model_validate(document).spec.program == program
    of_text = merged(GOOD, {"spec": spec})
    assert len(judged(control_plane, of_text)) == len(find_problems(of_text)[1]) == 2


def test_the_longest_name_is_taken(control_plane):
    document = merged(GOOD, {"metadata": {"name": "a" + "-" * 38 + "9"}})
    assert judged(control_plane, document) == []
    assert RLJob.model_validate(document).metadata.name


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"algorithm": {"groupsize": 4}}, "spec.algorithm.groupsize"),
        ({"env": {"hostNetwork": True}}, "spec.env.hostNetwork"),
        ({"rollout": {"nodeName": "node-1"}}, "spec.rollout.nodeName"),
        ({"env": {"volumes": [{"name": "host", "hostPath": {"path": "/"}}]}}, "spec.env.volumes[0].hostPath"),
        ({"actor": {"securityContext": {"privileged": True}}}, "spec.actor.securityContext.privileged"),
        ({"actor": {"initContainers": [{"name": "i", "lifecycle": {}}]}}, "spec.actor.initContainers[0].lifecycle"),
        ({"steps": 4}, "spec.steps"),
    ],
)
def test_an_unknown_field_is_refused_by_name(control_plane, spec, field):
    document = merged(GOOD, {"spec": spec})
    assert f'strict decoding error: unknown field "{field}"' in " ".join(
        said for _, said in judged(control_plane, document)
    )
    with pytest.raises(ValidationError, match="is not a known field"):
        RLJob.model_validate(document)


def test_kubectl_asks_for_strictness_by_itself(control_plane):
    text = json.dumps(merged(GOOD, {"spec": {"env": {"hostNetwork": True}}}))
    answer = control_plane.kubectl("apply", "--dry-run=server", "-f", "-", stdin=text, check=False)
    assert answer.returncode == 1 and 'unknown field "spec.env.hostNetwork"' in answer.stderr


def test_what_cannot_be_expressed_is_pruned_even_when_the_client_does_not_ask(control_plane, namespace):
    document = merged(GOOD, {"spec": {"env": {"hostNetwork": True, "securityContext": {"privileged": True}}}})
    control_plane.kubectl("create", "--validate=ignore", "-n", namespace, "-f", "-", stdin=json.dumps(document))
    assert control_plane.get("rljob", "good", namespace=namespace)["spec"]["env"] == {"securityContext": {}}
