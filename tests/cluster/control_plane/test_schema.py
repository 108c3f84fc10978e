"""The resource as the API server serves it: accepted jobs, edits, defaults, scale, columns; and that its verdict is pydantic's."""

import copy
import json
from pathlib import Path

import kubernetes
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rl_core.api.job import RLJob, RLJobSpec
from tests.unit.operator.manifest_samples import FULL_POD

ROOT = Path(__file__).parents[3]
EXAMPLES = [*ROOT.glob("examples/*/*.yaml"), ROOT / "examples" / "reference.yaml"]
JOBS = sorted(path for path in EXAMPLES if path.parent.name != "autoscaling")  # which holds what scales a job
MINIMAL = {"model": {"path": "/models/tiny"}, "data": {"train": "/data/train.jsonl"}}


def job(spec, name="job"):
    return {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": name}, "spec": spec}


def with_spec(**blocks):
    return job(copy.deepcopy(MINIMAL) | blocks)


def edit(access, namespace, *, check=True, **spec):
    """Merge blocks into the spec of the job named job."""
    patch = json.dumps({"spec": spec})
    return access.kubectl("patch", "rlj/job", "-n", namespace, "--type=merge", "-p", patch, check=check)


@pytest.fixture
def stored(control_plane, namespace):
    """A minimal job in the namespace."""
    control_plane.apply(with_spec(), namespace=namespace)
    return namespace


@pytest.mark.parametrize("path", JOBS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_each_example_is_taken_by_plain_apply(control_plane, namespace, path):
    documents = [document for document in yaml.safe_load_all(path.read_text()) if document["kind"] == "RLJob"]
    assert documents
    for document in documents:
        control_plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(document))
        kept = control_plane.get("rljob", document["metadata"]["name"], namespace=namespace)
        assert RLJob.model_validate(kept).spec == RLJob.model_validate(document).spec


def test_each_pod_field_is_kept_as_written_for_each_role(control_plane, namespace):
    roles = {"actor": FULL_POD, "rollout": FULL_POD | {"replicas": 1}, "env": FULL_POD}
    document = with_spec(**roles)
    control_plane.apply(document, namespace=namespace)
    kept = control_plane.get("rljob", "job", namespace=namespace)
    assert kept["spec"] == document["spec"]
    assert RLJob.model_validate(kept).spec == RLJob.model_validate(document).spec


def test_nothing_is_filled_in_but_what_an_autoscaler_needs(control_plane, stored):
    kept = control_plane.get("rljob", "job", namespace=stored)
    assert kept["spec"] == MINIMAL | {"rollout": {"replicas": 1}}
    assert "finalizers" not in kept["metadata"]


@pytest.mark.parametrize(("verb", "off"), [("create", None), ("create", 0), ("apply", 0)])
def test_what_has_a_default_can_be_switched_off(control_plane, namespace, verb, off):
    blocks = {"checkpoint": {"everySteps": off, "path": None}, "actor": {"gradClip": off}}
    control_plane.kubectl(verb, "-n", namespace, "-f", "-", stdin=yaml.safe_dump(with_spec(**blocks)))
    spec = control_plane.get("rljob", "job", namespace=namespace)["spec"]
    assert spec["checkpoint"] == {"everySteps": off} and spec["actor"] == {"gradClip": off}
    read = RLJobSpec.model_validate(spec)
    assert read.checkpoint.every_steps is None and read.actor.grad_clip is None


def test_client_side_apply_of_the_definition_and_of_a_job_works(control_plane, namespace):
    control_plane.kubectl("apply", "--dry-run=server", "-f", ROOT / "crds" / "rljob.yaml")
    text = yaml.safe_dump(with_spec())
    control_plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=text)
    again = control_plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=text)
    assert "unchanged" in again.stdout


def test_short_name_and_category_find_jobs(control_plane, stored):
    for word in ("rlj", "rljobs", "rl"):
        assert "job" in control_plane.kubectl("get", word, "-n", stored, "-o", "name").stdout


def test_scale_reads_and_sets_the_rollouts(control_plane, stored):
    status = {
        "status": {
            "rollout": {"replicas": 3, "readyReplicas": 1, "selector": "rljob.dev/job=job,rljob.dev/role=rollout"}
        }
    }
    patch = ["patch", "rlj/job", "-n", stored, "--type=merge", "--subresource=status", "-p", json.dumps(status)]
    control_plane.kubectl(*patch)
    control_plane.kubectl("scale", "rlj/job", "-n", stored, "--replicas=3", "--current-replicas=1")
    path = f"/apis/rljob.dev/v1alpha1/namespaces/{stored}/rljobs/job/scale"
    scale = json.loads(control_plane.kubectl("get", "--raw", path).stdout)
    assert scale["spec"] == {"replicas": 3}
    assert scale["status"] == {"replicas": 3, "selector": status["status"]["rollout"]["selector"]}
    assert control_plane.get("rljob", "job", namespace=stored)["spec"]["rollout"]["replicas"] == 3


def test_scale_beyond_what_the_job_allows_is_refused(control_plane, stored):
    edit(control_plane, stored, rollout={"maxReplicas": 2})
    answer = control_plane.kubectl("scale", "rlj/job", "-n", stored, "--replicas=3", check=False)
    assert "maxReplicas must not be below replicas 3, got 2; raise maxReplicas" in answer.stderr


def test_rollouts_that_a_placement_numbers_are_scaled_in_two_writes(control_plane, namespace):
    document = with_spec(placement={"componentPlacement": {"actor": 0, "rollout": "1-2"}}, rollout={"replicas": 2})
    control_plane.apply(document, namespace=namespace)
    answer = control_plane.kubectl("scale", "rlj/job", "-n", namespace, "--replicas=3", check=False)
    words = "rollout.replicas must stay 2 while placement.componentPlacement numbers its pods, got 3; set suspend: true, then edit both"
    assert words in answer.stderr
    edit(control_plane, namespace, env={"replicas": 2})
    edit(control_plane, namespace, suspend=True)
    placed = {"placement": {"componentPlacement": {"rollout": "1-3"}}, "rollout": {"replicas": 3}}
    edit(control_plane, namespace, **placed)
    kept = control_plane.get("rljob", "job", namespace=namespace)["spec"]
    assert kept["placement"] == {"componentPlacement": {"actor": 0, "rollout": "1-3"}}


def test_groups_keep_their_names_and_change_in_number_only(control_plane, namespace):
    judge = {"name": "judge", "worker": "judges:Judge", "config": {"levels": [1, {"deep": True}]}, "image": "judges:1"}
    jury = {"name": "jury", "worker": "judges:Jury", "lifecycle": "gang", "callers": ["judge"]}
    control_plane.apply(with_spec(groups=[judge, jury], program="judges:Program"), namespace=namespace)
    assert control_plane.get("rljob", "job", namespace=namespace)["spec"]["groups"] == [judge, jury]
    edit(control_plane, namespace, groups=[judge | {"replicas": 3, "image": "judges:2", "lifecycle": "elastic"}, jury])
    fixed = "groups must stay as they are but for replicas of elastic groups and the pod fields while the job is not suspended"
    for change in ([judge, jury | {"replicas": 2}], [judge | {"worker": "a:B"}, jury], [judge, jury | {"callers": []}]):
        assert fixed in edit(control_plane, namespace, check=False, groups=change).stderr
    named = "groups must keep their names; delete the job and create it anew"
    edit(control_plane, namespace, suspend=True)
    edit(control_plane, namespace, groups=[judge | {"worker": "a:B", "gpus": 1}, jury | {"replicas": 2}])
    for change in ([judge], [judge, jury | {"name": "other"}], None):
        assert named in edit(control_plane, namespace, check=False, groups=change).stderr


def test_columns_tell_the_run_at_a_glance(control_plane, stored):
    status = {
        "phase": "Running",
        "epoch": 2,
        "restarts": 1,
        "reward": 0.8125,
        "policyVersion": 12,
        "lag": 1,
        "columns": {"step": "12/200", "rollouts": "2/3", "actors": "1/1", "envs": "1/1", "reason": "RolloutsMissing"},
        "checkpoint": {"lastStep": 10},
    }
    patch = json.dumps({"status": status})
    control_plane.kubectl("patch", "rlj/job", "-n", stored, "--type=merge", "--subresource=status", "-p", patch)
    head, row = (line.split() for line in control_plane.kubectl("get", "rlj", "-n", stored).stdout.splitlines())
    assert head == ["NAME", "PHASE", "STEP", "REWARD", "VERSION", "LAG", "ROLLOUTS", "RESTARTS", "AGE"]
    assert row[:-1] == ["job", "Running", "12/200", "0.8125", "12", "1", "2/3", "1"]
    head, row = (
        line.split() for line in control_plane.kubectl("get", "rlj", "-n", stored, "-o", "wide").stdout.splitlines()
    )
    assert head[9:] == ["ATTEMPT", "ACTOR", "ENV", "CHECKPOINT", "SUCCESS", "REASON"]
    assert row[9:] == ["2", "1/1", "1/1", "10", "RolloutsMissing"]
    chosen = control_plane.kubectl("get", "rlj", "-n", stored, "--field-selector=status.phase=Running", "-o", "name")
    assert "job" in chosen.stdout


def test_status_is_written_by_its_subresource_only(control_plane, namespace):
    control_plane.apply(with_spec() | {"status": {"phase": "Succeeded"}}, namespace=namespace)
    assert "status" not in control_plane.get("rljob", "job", namespace=namespace)


@pytest.mark.parametrize(
    ("blocks", "field", "message"),
    [
        (
            {"model": {"path": "/models/other"}},
            "spec.model",
            "model.path must stay /models/tiny while the job is not suspended, got /models/other; set suspend: true, then edit it",
        ),
        (
            {"algorithm": {"name": "rloo"}},
            "spec.algorithm",
            "algorithm.name must stay grpo while the job is not suspended, got rloo; set suspend: true, then edit it",
        ),
        (
            {"actor": {"replicas": 2}},
            "spec.actor",
            "actor.replicas must stay 1 while the job is not suspended, got 2; set suspend: true, then edit it",
        ),
        (
            {"data": {"promptKey": "question"}},
            "spec.data",
            "data must stay as it is while the job is not suspended, got a change; set suspend: true, then edit it",
        ),
        (
            {"algorithm": {"loss": {"clipHigh": 0.3}}},
            "spec.algorithm",
            "algorithm must stay as it is but for steps, maxStaleness while the job is not suspended, got a change; set suspend: true, then edit it",
        ),
        (
            {"algorithm": {"maxStaleness": 1}},
            "spec.algorithm",
            "algorithm.maxStaleness must stay 0 while the job is not suspended, got 1; set suspend: true, then edit it",
        ),
        (
            {"rollout": {"sampling": {"temperature": 0.5}}},
            "spec.rollout",
            "rollout must stay as it is but for replicas, minReplicas, maxReplicas, autoscale, engineArgs, the pod fields while the job is not suspended, got a change; set suspend: true, then edit it",
        ),
        (
            {"actor": {"optimizer": {"weightDecay": 0.5}}},
            "spec.actor",
            "actor must stay as it is but for optimizer.learningRate, the pod fields while the job is not suspended, got a change; set suspend: true, then edit it",
        ),
        (
            {"placement": {"componentPlacement": {"actor": 0, "rollout": 1}}},
            "spec.placement",
            "placement must stay as it is while the job is not suspended, got a change; set suspend: true, then edit it",
        ),
        (
            {"extensions": ["mine"]},
            "spec.extensions",
            "extensions must stay as it is while the job is not suspended, got a change; set suspend: true, then edit it",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("spec.") else "",
)
def test_what_a_running_job_would_not_honour_takes_two_writes(control_plane, stored, blocks, field, message):
    answer = edit(control_plane, stored, check=False, **blocks)
    assert f"{field}: Invalid value: {message}" in answer.stderr, answer.stderr
    assert edit(control_plane, stored, check=False, suspend=True, **blocks).returncode == 1
    edit(control_plane, stored, suspend=True)
    edit(control_plane, stored, **blocks)
    edit(control_plane, stored, suspend=False)


@pytest.mark.parametrize(
    "blocks",
    [
        {"rollout": {"replicas": 3, "minReplicas": 2, "maxReplicas": 4}},
        {"env": {"replicas": 2}},
        {"algorithm": {"steps": 400, "maxStaleness": 0}},
        {"actor": {"optimizer": {"learningRate": 1e-5}}},
        {"checkpoint": {"everySteps": 7, "keep": 1}},
        {"ttlSecondsAfterFinished": 60, "activeDeadlineSeconds": 3600, "startDeadlineSeconds": 60},
        {"failurePolicy": {"maxRestarts": 9}},
        {"actor": {"image": "registry.test/actor:2", "resources": {"limits": {"memory": "4Gi"}}}},
        {"algorithm": {"name": "grpo", "groupSize": 8}, "model": {"dtype": "float32"}},
    ],
    ids=lambda blocks: ",".join(
        f"{name}.{next(iter(block), '')}" if isinstance(block, dict) else name for name, block in blocks.items()
    ),
)
def test_what_a_job_takes_while_it_runs_takes_one_write(control_plane, stored, blocks):
    edit(control_plane, stored, **blocks)


def test_who_manages_a_job_never_changes(control_plane, stored):
    edit(control_plane, stored, suspend=True)
    answer = edit(control_plane, stored, check=False, managedBy="kueue.x-k8s.io/multikueue")
    assert (
        "spec.managedBy: Invalid value: managedBy must stay rljob.dev/operator, got kueue.x-k8s.io/multikueue; delete the job and create it anew"
        in answer.stderr
    )


# --- the API server's verdict is pydantic's -------------------------------------------------------------------------------

DEFINITIONS = RLJobSpec.model_json_schema(by_alias=True)["$defs"]
PATTERNED = [
    "data",
    "a-b",
    "Data",
    "/data",
    "/",
    "data:x",
    "500m",
    "1.5Gi",
    "1 GB",
    "-1",
    "10.0.0.0/8",
    "ten/8",
    "::/0",
    "",
]


def values(schema) -> st.SearchStrategy:
    """Return values on and around the bounds of a schema, sometimes of another type."""
    if "$ref" in schema:
        schema = DEFINITIONS[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        return st.one_of(*(values(option) for option in schema["anyOf"] if option.get("type") != "null"))
    if "enum" in schema or "const" in schema:
        return st.sampled_from([*schema.get("enum", [schema.get("const")]), "other", 3])
    if schema["type"] == "object":
        return blocks(schema) if "properties" in schema else maps(schema)
    if schema["type"] == "array":
        return st.lists(values(schema["items"]), max_size=3)
    if schema["type"] == "string":
        return st.sampled_from(PATTERNED) | st.integers(0, 300).map("x".__mul__)
    if schema["type"] == "boolean":
        return st.sampled_from([True, False, "yes", 1])
    ends = [schema[key] + step for key in BOUNDS if key in schema for step in (-1, 0, 1)]
    return st.sampled_from([*ends, 0, 1, 2, "three", True, *([0.5] if schema["type"] == "number" else [])])


BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def maps(schema) -> st.SearchStrategy:
    if not isinstance(schema.get("additionalProperties"), dict):
        return st.just({"free": [1, {"form": None}]})
    keys = st.sampled_from(["a", "RANK", "RLJOB_X", "nvidia.com/gpu", "cpu", "rljob.dev/job", "app.kubernetes.io/name"])
    return st.dictionaries(keys, values(schema["additionalProperties"]), max_size=2)


def blocks(schema) -> st.SearchStrategy:
    """Return objects with the required fields and a few others."""
    fields = {name: st.deferred(lambda inner=inner: values(inner)) for name, inner in schema["properties"].items()}
    required = {name: fields[name] for name in schema.get("required", ())}
    others = st.sets(st.sampled_from(sorted(fields)), max_size=3)
    return others.flatmap(lambda names: st.fixed_dictionaries(required | {name: fields[name] for name in names}))


SPEC_FIELDS = RLJobSpec.model_json_schema(by_alias=True)["properties"]


@settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_api_server_and_pydantic_judge_alike(control_plane, data):
    name = data.draw(st.sampled_from(sorted(SPEC_FIELDS)))
    spec = copy.deepcopy(MINIMAL) | {name: data.draw(values(SPEC_FIELDS[name]))}
    document = job(spec)
    try:
        RLJob.model_validate(document)
        verdict = ""
    except ValidationError as error:
        verdict = str(error)
    try:
        control_plane.custom.create_namespaced_custom_object(
            "rljob.dev", "v1alpha1", "default", "rljobs", document, dry_run="All", field_validation="Strict"
        )
        said = ""
    except kubernetes.client.ApiException as error:
        assert error.status in (400, 422), error
        said = json.loads(error.body)["message"]
    assert bool(said) == bool(verdict), f"{spec}\nAPI server: {said or 'taken'}\npydantic: {verdict or 'taken'}"
