"""The cluster's side of `rljob` against a real API server: what is sent, what is told, and clear words for what goes wrong."""

import json
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from rl_core.cli.main import app
from rljob_operator.cli import commands

commands.register(app)
SPEC = {
    "model": {"path": "/models/tiny"},
    "data": {"train": "/data/train.jsonl"},
    "rollout": {"replicas": 2, "maxReplicas": 8},
}


@pytest.fixture
def rljob(control_plane, namespace, monkeypatch, tmp_path):
    """Run `rljob ARGUMENTS -n NAMESPACE` in this process; `.submit(...)` writes a job file first."""
    monkeypatch.setenv("KUBECONFIG", str(control_plane.kubeconfig))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments, kubeconfig=None):
        if kubeconfig is not None:
            monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        found = CliRunner().invoke(app, [*map(str, arguments), "-n", namespace], catch_exceptions=False)
        return SimpleNamespace(code=found.exit_code, out=found.stdout, err=found.stderr)

    def submit(*arguments, name="add", others=(), **spec):
        file = tmp_path / "job.yaml"
        job = {
            "apiVersion": "rljob.dev/v1alpha1",
            "kind": "RLJob",
            "metadata": {"name": name},
            "spec": {**SPEC, **spec},
        }
        file.write_text(yaml.safe_dump_all([*others, job]))
        return run("submit", file, *arguments)

    run.submit = submit
    run.job = lambda name="add": control_plane.get("rljob", name, namespace=namespace)
    run.says = lambda status, name="add": control_plane.kubectl(
        "patch",
        "rljob",
        name,
        "-n",
        namespace,
        "--subresource=status",
        "--type=merge",
        "-p",
        json.dumps({"status": status}),
    )
    return run


def test_a_submitted_job_is_scaled_suspended_and_resumed_in_its_spec(rljob):
    told = rljob.submit()
    assert told.code == 0 and "add: submitted" in told.out
    assert rljob("scale", "add", "--replicas", "4", "--env", "3").code == 0
    assert rljob("suspend", "add").code == 0
    spec = rljob.job()["spec"]
    assert (spec["rollout"]["replicas"], spec["env"]["replicas"], spec["suspend"]) == (4, 3, True)
    assert rljob("resume", "add").code == 0 and rljob.job()["spec"]["suspend"] is False
    assert rljob.job()["metadata"]["generation"] == 5


def test_what_stands_beside_the_job_in_its_file_is_applied_with_it(rljob, control_plane, namespace):
    claim = {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "work"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }  # fmt: skip
    assert rljob.submit(others=[claim]).code == 0
    assert control_plane.get("pvc", "work", namespace=namespace)["spec"]["accessModes"] == ["ReadWriteOnce"]


def test_a_dry_run_asks_the_api_server_and_stores_nothing(rljob, control_plane, namespace, tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code/reward.py").write_text("x = 1")
    told = rljob.submit("--dry-run", "--code", tmp_path / "code")
    assert told.code == 0 and "accepted" in told.out
    assert (
        control_plane.kubectl(
            "get", "rljobs,configmaps", "-l", "app.kubernetes.io/instance=add", "-n", namespace, "-o", "name"
        ).stdout
        == ""
    )


def test_code_goes_along_as_a_config_map_that_the_job_owns(rljob, control_plane, namespace, tmp_path):
    code = tmp_path / "code"
    (code / "__pycache__").mkdir(parents=True)
    (code / "reward.py").write_text("def reward(prompts, completions):\n    return [1.0 for _ in completions]\n")
    (code / "table.bin").write_bytes(b"\xff\xfe")
    (code / ".hidden").write_text("no")
    assert rljob.submit("--code", code).code == 0
    job = rljob.job()
    modules = control_plane.get("configmap", job["spec"]["code"]["configMap"], namespace=namespace)
    assert modules["data"] == {"reward.py": (code / "reward.py").read_text()} and list(modules["binaryData"]) == [
        "table.bin"
    ]
    assert modules["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    control_plane.kubectl("delete", "rljob", "add", "-n", namespace)
    control_plane.kubectl(
        "wait", "--for=delete", f"configmap/{modules['metadata']['name']}", "-n", namespace, "--timeout=180s"
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: None, "must hold at least one file"),
        (lambda folder: (folder / "big.py").write_bytes(b"#" * (1 << 20)), "at most 1008 KiB, got 1024 KiB"),
        (lambda folder: (folder / "pack").mkdir() or (folder / "pack/a.py").touch(), "no folders, got pack"),
    ],
    ids=["empty", "too big", "a package"],
)
def test_code_that_cannot_travel_is_refused_before_anything_is_made(
    rljob, control_plane, namespace, tmp_path, make, words
):
    code = tmp_path / "code"
    code.mkdir()
    make(code)
    told = rljob.submit("--code", code)
    assert told.code == 2 and words in told.err
    assert control_plane.kubectl("get", "rljobs", "-n", namespace, "-o", "name").stdout == ""


def test_status_and_top_tell_what_the_operator_says(rljob):
    rljob.submit()
    assert json.loads(rljob("status", "add").out)["phase"] == "Pending"
    rljob.says(
        {
            "phase": "Running", "step": 12, "totalSteps": 200, "reward": 0.5, "policyVersion": 12, "lag": 0, "epoch": 1, "restarts": 0,
            "columns": {"step": "12/200", "rollouts": "1/2"},
            "roles": [{"name": "rollout", "desired": 2, "ready": 1, "active": 2, "failed": 0, "restarts": 1, "minVersion": 11, "maxVersion": 12}],
            "conditions": [
                {"type": "Degraded", "status": "True", "reason": "BelowDesired", "message": "1 of 2 rollouts", "lastTransitionTime": "2026-01-01T00:00:00Z"},
                {"type": "Ready", "status": "True", "reason": "Ready", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"},
            ],
        }
    )  # fmt: skip
    status = json.loads(rljob("status", "add").out)
    assert (status["name"], status["phase"], status["step"]) == ("add", "Running", 12)
    shown = rljob("top", "add", "--once").out
    assert (
        all(word in shown for word in ("Running", "12/200", "1/2", "11..12", "BelowDesired"))
        and "Complete" not in shown
    )
    assert rljob("checkpoint", "add").out == "add: no checkpoint yet\n"
    rljob.says({"checkpoint": {"lastStep": 10, "path": "/checkpoints/c"}})
    assert "lastStep: 10" in rljob("checkpoint", "add").out


@pytest.mark.parametrize(("phase", "code"), [("Succeeded", 0), ("Failed", 3)])
def test_wait_ends_with_the_job_and_its_exit_code(rljob, monkeypatch, phase, code):
    from rljob_operator.cli import jobs

    asked = iter([{}, {"step": 1, "totalSteps": 2, "phase": "Running"}, {"step": 2, "totalSteps": 2, "phase": phase}])
    read = jobs.read

    def moves_on(connection, name):
        rljob.says(next(asked))
        return read(connection, name)

    monkeypatch.setattr("rljob_operator.cli.submit.POLL_SECONDS", 0.01)
    monkeypatch.setattr(jobs, "read", moves_on)
    told = rljob.submit("--wait")
    assert told.code == code
    assert ["add: Pending", "add: Running  step 1/2", f"add: {phase}  step 2/2"] == told.out.splitlines()[1:]


def test_logs_name_pods_without_one_and_those_that_there_are(rljob, control_plane, namespace):
    rljob.submit()
    told = rljob("logs", "add", "--role", "env")
    assert told.code == 2 and "no pod of job add matches role env" in told.err and "none exist" in told.err
    labels = {"rljob.dev/job": "add", "rljob.dev/role": "rollout", "rljob.dev/index": "1", "rljob.dev/epoch": "3"}
    pod = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "add-rollout-1", "labels": labels},
        "spec": {"containers": [{"name": "rollout", "image": "none.test/none"}], "nodeSelector": {"no": "where"}},
    }  # fmt: skip
    control_plane.apply(pod, namespace=namespace)
    told = rljob("logs", "add", "--attempt", "3")
    assert told.code == 0 and told.out.startswith("rollout-1: (no log")
    told = rljob("logs", "add", "--index", "7")
    assert told.code == 2 and "pods: rollout-1" in told.err


def test_a_wrong_name_lists_near_ones(rljob):
    rljob.submit(name="arithmetic")
    told = rljob("suspend", "arithmetik")
    assert told.code == 2 and "did you mean arithmetic?" in told.err
    assert "got none of that name" in rljob("status", "nothing-like-it").err


def test_a_job_that_exists_is_not_replaced(rljob):
    rljob.submit()
    told = rljob.submit(rollout={"replicas": 1})
    assert told.code == 2 and "must not exist" in told.err and rljob.job()["spec"]["rollout"]["replicas"] == 2


def test_an_invalid_job_is_refused_with_every_problem_and_its_field(rljob):
    told = rljob.submit(rollout={"replicas": 2, "minReplicas": 3}, algorithm={"groupSize": 1}, nonsense=1)
    assert told.code == 2
    assert all(word in told.err for word in ("spec.rollout: minReplicas", "groupSize", "nonsense"))


def test_a_change_that_the_api_server_refuses_is_told_in_its_words(rljob):
    rljob.submit()
    told = rljob("scale", "add", "--replicas", "9")
    assert told.code == 2 and "maxReplicas" in told.err and "scaling job add" in told.err


def test_without_rights_the_account_and_the_verb_are_told(rljob, control_plane, namespace):
    rljob.submit()
    told = rljob("status", "add", kubeconfig=control_plane.kubeconfig_of("default", namespace=namespace))
    assert told.code == 2 and "must be allowed" in told.err and "cannot get resource" in told.err


def test_without_a_kubeconfig_or_a_server_the_way_out_is_told(rljob, control_plane, tmp_path):
    told = rljob("status", "add", kubeconfig=tmp_path / "none")
    assert told.code == 2 and "a kubeconfig must say which cluster to use" in told.err
    gone = yaml.safe_load(control_plane.kubeconfig.read_text())
    gone["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"
    (tmp_path / "gone").write_text(yaml.safe_dump(gone))
    told = rljob("status", "add", kubeconfig=tmp_path / "gone")
    assert told.code == 3 and "the API server https://127.0.0.1:9 must answer" in told.err
    assert rljob("status", "add", "--context", "nowhere", kubeconfig=control_plane.kubeconfig).code == 2


def test_a_cluster_without_the_resource_says_what_to_install(rljob, monkeypatch):
    from dataclasses import replace

    from rljob_operator import kinds
    from rljob_operator.cli import jobs

    monkeypatch.setattr(jobs, "RLJOB", replace(kinds.RLJOB, group="absent.rljob.dev"))
    told = rljob("status", "add")
    assert told.code == 2 and "does not serve; install the chart" in told.err
