"""Pods as made: what every pod is held to, that each field of a role arrives, and what the template hash stands for."""

import json
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.api.pods import PodSpec
from rl_core.plan import keys
from rl_core.plan.groups import groups_of
from rl_core.plan.launch import PodPlan
from rljob_operator import manifests, naming
from rljob_operator.manifests import claims, containers
from rljob_operator.model import OperatorConfig
from tests.unit.operator.manifest_samples import (
    CONFIG,
    FULL_POD,
    MASTER,
    ROLES,
    UID,
    full_job,
    make_job,
    make_plan,
    make_pods,
)

JOBS = {
    "minimal": make_job(),
    "full": full_job(),
    "gpus": make_job(actor={"gpus": 4, "processesPerPod": 2}, rollout={"gpus": 1}),
    "gang": make_job(actor={"replicas": 3}, algorithm={"promptsPerStep": 33}, rollout={"replicas": 2}),
}


def all_pods():
    return [pytest.param(pod, id=f"{name}-{pod['metadata']['name']}") for name, job in JOBS.items() for pod in make_pods(job).values()]  # fmt: skip


def every_container(pod):
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def env_of(container):
    return {one["name"]: one.get("value") for one in container.get("env", [])}


def expanded(value):
    """Return what the kubelet makes of a value without references: `$$` is `$`."""
    assert not re.search(r"(?<!\$)(\$\$)*\$\(", value), f"{value} would be expanded"
    return value.replace("$$", "$")


def plan_of(container):
    return PodPlan.from_json(expanded(env_of(container)["RLJOB_POD_PLAN"]))


# --- what every pod is held to --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pod", all_pods())
def test_every_container_is_restricted(pod):
    for container in every_container(pod):
        context = container["securityContext"]
        assert context["runAsNonRoot"] is True and context["privileged"] is False
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    spec = pod["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] > 0
    assert not {"hostNetwork", "hostPID", "hostIPC", "nodeName"} & set(spec)
    assert not any("hostPath" in volume for volume in spec["volumes"])


@pytest.mark.parametrize("pod", all_pods())
def test_pods_have_no_rights_and_never_restart_in_place(pod):
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False
    assert spec["restartPolicy"] == "Never" and spec["shareProcessNamespace"] is False


@pytest.mark.parametrize(
    ("role", "devices"),
    [
        ({}, "void"),
        ({"gpus": 1}, None),
        ({"gpus": 1, "gpuResource": "nvidia.com/mig-1g.10gb"}, None),
        ({"gpus": 1, "gpuResource": "amd.com/gpu"}, "void"),
        ({"gpus": 1, "gpuAllocation": "dra", "deviceClass": "gpu.example.com"}, "void"),
        ({"resourceClaims": [{"name": "one", "resourceClaimName": "a"}]}, "void"),
        ({"resources": {"limits": {"nvidia.com/mig-1g.10gb": 1}}}, None),
        ({"resources": {"limits": {"nvidia.com/mig-1g.10gb": "0"}}}, "void"),
        ({"resources": {"limits": {"nvidia.com/hostdev": 1}}}, "void"),
    ],
    ids=str,
)
def test_nvidias_devices_are_void_but_where_a_container_asks_for_some_whose_runtime_then_says(role, devices):
    role = {**role, "envFrom": [{"configMapRef": {"name": "says-all"}}], "initContainers": [{"name": "init"}]}
    spec = make_pods(make_job(rollout=role))["sums-rollout-0"]["spec"]
    (main,), (init,) = spec["containers"], spec["initContainers"]
    assert [env_of(one).get("NVIDIA_VISIBLE_DEVICES") for one in (main, init)] == [devices, "void"]


def test_accelerators_are_asked_for_under_their_own_name():
    spec = make_pods(make_job(actor={"gpus": 2, "gpuResource": "amd.com/gpu"}))["sums-actor-0"]["spec"]
    assert spec["containers"][0]["resources"] == {"requests": {"amd.com/gpu": "2"}, "limits": {"amd.com/gpu": "2"}}


def test_rdma_gets_locked_memory_and_the_nodes_network_for_the_roles_own_container_alone():
    rdma = {
        "hostNetwork": True,
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "initContainers": [{"name": "i"}],
    }
    pods = make_pods(make_job(actor=rdma, rollout={"hostNetwork": True}))
    spec = pods["sums-actor-0"]["spec"]
    assert spec["hostNetwork"] is True and spec["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert spec["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert spec["initContainers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "hostNetwork" not in pods["sums-env-0"]["spec"]


@pytest.mark.parametrize("pod", all_pods())
def test_names_labels_and_owner_belong_to_the_job(pod):
    meta, spec = pod["metadata"], pod["spec"]
    role, index = meta["labels"]["rljob.dev/role"], meta["labels"]["rljob.dev/index"]
    assert meta["name"] == spec["hostname"] == f"sums-{role}-{index}" and spec["subdomain"] == "sums"
    assert meta["ownerReferences"] == [
        {
            "apiVersion": "rljob.dev/v1alpha1",
            "kind": "RLJob",
            "name": "sums",
            "uid": UID,
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]
    assert meta["labels"]["rljob.dev/job"] == meta["labels"]["app.kubernetes.io/instance"] == "sums"
    assert meta["labels"]["rljob.dev/job-uid"] == UID and meta["labels"]["rljob.dev/epoch"] == "1"
    assert meta["labels"]["app.kubernetes.io/component"] == role


@pytest.mark.parametrize("pod", all_pods())
def test_what_is_written_at_run_time_has_a_place_though_the_root_is_read_only(pod):
    for container in pod["spec"]["containers"]:
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert {"/tmp", "/dev/shm"} <= set(mounts) and not mounts["/tmp"].get("readOnly")
        assert mounts["/etc/rljob/keys"]["readOnly"] and env_of(container)["HOME"] == "/tmp"
    named = [volume["name"] for volume in pod["spec"]["volumes"]]
    assert len(named) == len(set(named))
    assert {mount["name"] for container in every_container(pod) for mount in container["volumeMounts"]} <= set(named)


def test_only_actor_pods_see_the_job_and_an_output_folder():
    for name, pod in make_pods(JOBS["gang"]).items():
        (container,) = pod["spec"]["containers"]
        paths = {mount["mountPath"] for mount in container["volumeMounts"]}
        is_actor = "-actor-" in name
        assert ("/etc/rljob/job.json" in paths) == ("/var/lib/rljob" in paths) == is_actor
        assert ("RLJOB_OUTPUT" in env_of(container)) == ("RLJOB_RESUME" in env_of(container)) == is_actor


def test_output_of_a_job_with_a_checkpoint_path_is_a_folder_of_this_very_job():
    first, second = (
        make_pods(make_job(uid=uid, checkpoint={"path": "/ckpt/"}))["sums-actor-0"] for uid in (UID, "f" + UID[1:])
    )
    outputs = [env_of(pod["spec"]["containers"][0])["RLJOB_OUTPUT"] for pod in (first, second)]
    assert outputs == ["/ckpt/sums-0b7c1a2d", "/ckpt/sums-fb7c1a2d"]
    assert not any(volume["name"] == "rljob-output" for volume in first["spec"]["volumes"])


def test_probes_look_at_progress_on_the_supervisors_port():
    (container,) = make_pods(JOBS["minimal"])["sums-env-0"]["spec"]["containers"]
    probes = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {name: get["path"] for name, get in probes.items()} == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
    assert {get["port"] for get in probes.values()} == {7703}


# --- the plan reaches the supervisor ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_a_supervisor_gets_the_processes_of_its_plan_with_the_environment_they_were_planned_with(job):
    for planned in make_plan(job, epoch=3).pods:
        (container,) = make_pods(job, epoch=3)[planned.name]["spec"]["containers"]
        around = {key: expanded(value) for key, value in env_of(container).items() if value is not None}
        found = plan_of(container)
        assert (found.name, found.role, found.index, found.claim) == (
            planned.name,
            planned.role,
            planned.index,
            planned.claim,
        )
        for ours, theirs in zip(found.containers[0].processes, planned.containers[0].processes, strict=True):
            code = {"PYTHONPATH": "/etc/rljob/code:/mine"} if job is JOBS["full"] and "PYTHONPATH" in theirs.env else {}
            assert (around | ours.env).items() >= (theirs.env | code).items()
            assert (ours.name, ours.command, ours.visible_devices) == (
                theirs.name,
                theirs.command,
                theirs.visible_devices,
            )


@settings(max_examples=200, deadline=None)
@given(value=st.text("$()aHOME{}\\ \n\"'", max_size=12))
def test_a_users_value_reaches_the_process_letter_by_letter(value):
    (container,) = make_pods(make_job(env={"env": {"VALUE": value}}))["sums-env-0"]["spec"]["containers"]
    assert kubelet_expansion(env_of(container)["VALUE"]) == value


def kubelet_expansion(text):
    """Kubernetes' own rule (third_party/forked/golang/expansion) with no variable defined."""
    result, at = [], 0
    while at < len(text):
        if text[at] == "$" and at + 1 < len(text):
            following = text[at + 1]
            if following == "$":
                result.append("$")
                at += 2
                continue
            if following == "(" and (end := text.find(")", at + 2)) >= 0:
                result.append(text[at : end + 1])  # undefined: stays as it is
                at = end + 1
                continue
        result.append(text[at])
        at += 1
    return "".join(result)


def test_the_largest_plan_fits_into_one_environment_variable():
    text = "x" * 4000
    job = make_job(
        name="j" * 40,
        namespace="n" * 63,
        actor={"replicas": 1, "processesPerPod": 64, "gpus": 64, "env": {f"V{number}": text for number in range(64)}},
        algorithm={"promptsPerStep": 64},
    )
    (container,) = make_pods(job)[f"{'j' * 40}-actor-0"]["spec"]["containers"]
    assert len(f"RLJOB_POD_PLAN={env_of(container)['RLJOB_POD_PLAN']}") < 128 * 1024  # MAX_ARG_STRLEN of Linux


def test_a_replacement_carries_the_attempt_of_its_role():
    job = make_job(rollout={"replicas": 2})
    pods = make_pods(job, attempts={"rollout": 4})
    found = {name: plan_of(pod["spec"]["containers"][0]).containers[0].processes[0].env for name, pod in pods.items()}
    assert found["sums-rollout-1"]["RLJOB_INCARNATION"] == "4.0"
    assert found["sums-env-0"]["RLJOB_INCARNATION"] == found["sums-actor-0"]["RLJOB_INCARNATION"] == "0.0"


def test_the_command_of_a_pod_starts_a_supervisor_on_the_plan_in_its_environment(tmp_path):
    """The container's command and variables, run as they are, but with a worker that only tells who it is."""
    job = make_job(env={"env": {"MARK": "$HOME is literal"}})
    (container,) = make_pods(job)["sums-env-0"]["spec"]["containers"]
    around = {key: expanded(value) for key, value in env_of(container).items() if value is not None}
    plan = json.loads(around["RLJOB_POD_PLAN"])
    tell = "import os; print(os.environ['RLJOB_POD'], os.environ['MARK'], os.environ.get('RLJOB_POD_PLAN'))"
    plan["containers"][0]["processes"][0] |= {"command": ["python", "-c", tell]}
    plan["containers"][0]["processes"][0]["env"].pop("RLJOB_HUB")
    around |= {"RLJOB_POD_PLAN": json.dumps(plan), "RLJOB_HEALTH_PORT": "0", "RLJOB_HEALTH_HOST": "127.0.0.1"}
    command = [sys.executable if word == "python" else word for word in container["command"]]
    done = subprocess.run(
        command, env={**os.environ, **around}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "sums-env-0 $HOME is literal None" in done.stdout


# --- what a role chose arrives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_each_field_a_role_may_choose_changes_its_pods_and_no_other_roles(role):
    plain = make_pods(make_job())
    for field, spec in PodSpec.model_fields.items():
        alias = spec.alias or field
        chosen = {alias: FULL_POD[alias]} | needed(alias)
        changed = make_pods(make_job(**{role: chosen}))
        for name, pod in changed.items():
            if name == f"sums-{role}-0":
                assert _without_hash(pod) != _without_hash(plain[name]), f"{alias} does not arrive in {name}"
            else:
                assert pod == plain[name], f"{alias} of {role} reaches {name}"


def needed(alias):
    """Return the fields without which `alias` says nothing or is refused."""
    gpus = {"gpus": 2, "gpuAllocation": "dra", "deviceClass": "gpu.example.com"}
    volumes = {"volumes": FULL_POD["volumes"]}
    return {
        "gpus": gpus,
        "gpuAllocation": gpus,
        "deviceClass": gpus,
        "volumeMounts": volumes,
        "initContainers": volumes,
        "gpuResource": {"gpus": 2},
    }.get(alias, {})


def _without_hash(pod):
    annotations = {
        key: value for key, value in pod["metadata"]["annotations"].items() if key != "rljob.dev/template-hash"
    }
    return pod | {"metadata": pod["metadata"] | {"annotations": annotations}}


def test_the_values_of_a_full_role_are_those_written():
    pod = make_pods(JOBS["full"])["sums-rollout-0"]
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    assert container["image"] == FULL_POD["image"] and container["imagePullPolicy"] == "IfNotPresent"
    for field in ("imagePullSecrets", "nodeSelector", "affinity", "serviceAccountName", "priorityClassName", "runtimeClassName", "schedulerName"):  # fmt: skip
        assert spec[field] == FULL_POD[field]
    assert spec["terminationGracePeriodSeconds"] == 77 and env_of(container)["RLJOB_GRACE_SECONDS"] == "77"
    assert includes(spec["volumes"][: len(FULL_POD["volumes"])], FULL_POD["volumes"])
    assert includes(container["volumeMounts"][: len(FULL_POD["volumeMounts"])], FULL_POD["volumeMounts"])
    assert container["envFrom"] == [
        {"prefix": "W_", "secretRef": {"name": "wandb", "optional": True}},
        {"prefix": "", "configMapRef": {"name": "settings", "optional": False}},
    ]
    assert container["resources"] == FULL_POD["resources"] | {
        "claims": [{"name": "gpus"}, {"name": "nic", "request": "one"}, {"name": "shared"}]
    }
    (template,) = (t for t in claims.templates(JOBS["full"], config=CONFIG) if "rollout" in t["metadata"]["name"])
    assert spec["resourceClaims"] == [
        {"name": "gpus", "resourceClaimTemplateName": template["metadata"]["name"]},
        {"name": "nic", "resourceClaimTemplateName": "nics"},
        {"name": "shared", "resourceClaimName": "all"},
    ]
    security = {"runAsUser": 2000, "runAsGroup": 3000, "fsGroup": 4000, "supplementalGroups": [5000]}
    assert spec["securityContext"].items() >= security.items()
    assert container["securityContext"]["readOnlyRootFilesystem"] is False
    assert {"name": "rljob-shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in spec["volumes"]
    assert pod["metadata"]["labels"]["team"] == "research" and pod["metadata"]["annotations"]["note"] == "hello"
    fetch, other, sidecar = spec["initContainers"]
    assert sidecar["restartPolicy"] == "Always" and "restartPolicy" not in fetch
    assert {"name": "MEMORY", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory"}}} in sidecar["env"]
    sources = {one["name"]: one["valueFrom"] for one in container["env"] if "valueFrom" in one}
    assert sources["NODE"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert sources["API_KEY"] == {"secretKeyRef": {"name": "wandb", "key": "key", "optional": True}}
    assert spec["dnsConfig"] == FULL_POD["dnsConfig"]
    assert (
        fetch["command"] == ["sh", "-c"]
        and fetch["args"] == ["echo $(HOME)"]
        and expanded(env_of(fetch)["KEY"]) == "$x"
    )
    assert fetch["image"] == FULL_POD["image"] and other["image"] == "registry.test/other:1"


def includes(made, written):
    """Return whether all that was written is in what was made, which may say more (defaults)."""
    if isinstance(written, dict):
        return all(key in made and includes(made[key], value) for key, value in written.items())
    if isinstance(written, list):
        return len(made) == len(written) and all(map(includes, made, written))
    return made == written


def test_the_users_code_is_on_the_path_before_the_users_own_path():
    for pod in make_pods(JOBS["full"]).values():
        for container in every_container(pod):
            assert env_of(container)["PYTHONPATH"].split(":")[0] == "/etc/rljob/code"
            assert {"name": "rljob-code", "mountPath": "/etc/rljob/code", "readOnly": True} in container["volumeMounts"]
        assert env_of(pod["spec"]["containers"][0])["PYTHONPATH"] == "/etc/rljob/code:/mine"


def test_a_spread_without_a_selector_counts_the_roles_own_pods():
    (one,) = make_pods(JOBS["full"])["sums-env-0"]["spec"]["topologySpreadConstraints"]
    assert one["labelSelector"]["matchLabels"] == {
        "rljob.dev/job": "sums",
        "rljob.dev/job-uid": UID,
        "rljob.dev/role": "env",
    }


def test_dead_nodes_are_left_after_30_seconds_unless_the_user_says_otherwise():
    def seconds(pod, key):
        return [t.get("tolerationSeconds") for t in pod["spec"]["tolerations"] if t.get("key") == key]

    plain, chosen = make_pods(JOBS["minimal"])["sums-env-0"], make_pods(JOBS["full"])["sums-env-0"]
    assert seconds(plain, "node.kubernetes.io/unreachable") == seconds(plain, "node.kubernetes.io/not-ready") == [30]
    assert seconds(chosen, "node.kubernetes.io/unreachable") == [5] and seconds(
        chosen, "node.kubernetes.io/not-ready"
    ) == [30]


def test_a_users_volume_on_a_path_of_ours_takes_its_place():
    for container in make_pods(JOBS["full"])["sums-actor-0"]["spec"]["containers"]:
        assert [m["name"] for m in container["volumeMounts"] if m["mountPath"] == "/tmp"] == ["memory"]


def test_a_users_label_never_replaces_ours():
    job = make_job(labels={"kueue.x-k8s.io/queue-name": "gold"}, env={"labels": {"kueue.x-k8s.io/queue-name": "mine"}})
    assert {pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] for pod in make_pods(job).values()} == {"gold"}


def test_images_come_from_the_job_then_the_operator_and_their_lack_is_told():
    config = OperatorConfig(images={"actor": "a", "rollout": "r"}, image_pull_policy="Always")
    job = make_job(rollout={"image": "mine"})
    pods = {pod.role: manifests.pods.build(job, pod, config=config) for pod in make_plan(job).pods if pod.role != "env"}
    chosen = {
        role: (c := pod["spec"]["containers"][0])["image"] + " " + c["imagePullPolicy"] for role, pod in pods.items()
    }
    assert chosen == {"actor": "a Always", "rollout": "mine Always"}
    assert containers.image_of(groups_of(job.spec)["env"], config=config) is None
    with pytest.raises(containers.ImageMissing, match=r"env\.image must name an image"):
        make_pods(job, config=config)


# --- keys --------------------------------------------------------------------------------------------------------------------


def test_a_pod_sees_the_secrets_of_its_own_processes_all_public_halves_and_the_token_on_actor_0_only():
    seen = {}
    for name, pod in make_pods(JOBS["gang"]).items():
        (volume,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "rljob-keys")
        (source,) = volume["projected"]["sources"]
        assert source["secret"]["name"] == naming.secret("sums", UID)
        items = source["secret"]["items"]
        assert {f"{role}.public" for role in keys.key_names()} == {i["path"] for i in items if i["mode"] == 0o444}
        seen[name] = sorted(i["path"] for i in items if i["mode"] == 0o400)
    assert seen["sums-actor-0"] == ["actor.secret", "channel.secret", "control.token", "runner.secret"]
    assert seen["sums-actor-1"] == seen["sums-actor-2"] == ["actor.secret"]
    assert seen["sums-rollout-0"] == ["rollout.secret"] and seen["sums-env-0"] == ["env.secret"]


def test_the_secret_comes_back_byte_equal_and_is_another_for_another_job():
    job = JOBS["minimal"]
    raw = job.model_dump(mode="json", by_alias=True)
    assert manifests.secret.build(job, master=MASTER) == manifests.secret.build(raw, master=MASTER)
    other = make_job(uid="f" + UID[1:])
    ours, theirs = (manifests.secret.build(one, master=MASTER) for one in (job, other))
    assert ours["metadata"]["name"] != theirs["metadata"]["name"]
    assert not set(ours["data"].values()) & set(theirs["data"].values())
    assert set(ours["data"]) == set(keys.key_files(MASTER, UID)) and ours["immutable"] is True


# --- the template hash -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_the_template_hash_covers_each_setting_of_its_role_but_counts(role):
    before = {r: manifests.template_hash(make_job(), groups_of(make_job().spec)[r], config=CONFIG) for r in ROLES}
    for field, spec in PodSpec.model_fields.items():
        alias = spec.alias or field
        job = make_job(**{role: {alias: FULL_POD[alias]} | needed(alias)})
        after = {r: manifests.template_hash(job, groups_of(job.spec)[r], config=CONFIG) for r in ROLES}
        assert {r for r in ROLES if after[r] != before[r]} == {role}, alias


@pytest.mark.parametrize(
    "job",
    [
        make_job(rollout={"replicas": 5, "minReplicas": 2, "maxReplicas": 9}),
        make_job(env={"replicas": 5}),
        make_job(actor={"replicas": 2}),
        make_job(actor={"optimizer": {"learningRate": 0.5}}),
        make_job(algorithm={"steps": 7}, checkpoint={"everySteps": 9}),
    ],
    ids=["rollouts", "envs", "world size", "learning rate", "not of a role"],
)
def test_the_template_hash_leaves_counts_and_live_settings_out(job):
    for role in ROLES:
        assert manifests.template_hash(job, groups_of(job.spec)[role], config=CONFIG) == manifests.template_hash(
            make_job(), groups_of(make_job().spec)[role], config=CONFIG
        )


def test_the_template_hash_knows_the_image_but_neither_epoch_nor_operator_version():
    job = make_job()
    hashes = {
        pod["metadata"]["annotations"]["rljob.dev/template-hash"]
        for config in (CONFIG, OperatorConfig(images=CONFIG.images, version="9.9.9"))
        for epoch in (1, 7)
        for name, pod in make_pods(job, config=config, epoch=epoch).items()
        if name == "sums-actor-0"
    }
    assert hashes == {manifests.template_hash(job, groups_of(job.spec)["actor"], config=CONFIG)}
    other = OperatorConfig(images={**CONFIG.images, "actor": "newer"})
    assert manifests.template_hash(job, groups_of(job.spec)["actor"], config=other) not in hashes


def test_kueue_admits_the_actors_pods_of_an_epoch_as_one_group():
    def marks(**job):
        pods = make_pods(make_job(labels={"kueue.x-k8s.io/queue-name": "gold"}, **job)).values()
        metas = [pod["metadata"] for pod in pods]
        names = [meta["labels"].get("kueue.x-k8s.io/pod-group-name") for meta in metas]
        counts = [meta["annotations"].get("kueue.x-k8s.io/pod-group-total-count") for meta in metas]
        return {(meta["labels"]["rljob.dev/role"], *rest) for meta, *rest in zip(metas, names, counts, strict=True)}

    marked = marks(actor={"replicas": 2})
    (group,) = {name for role, name, _ in marked if role == "actor"}
    assert marked == {("actor", group, "2"), ("rollout", None, None), ("env", None, None)} and len(group) <= 63
    assert ("actor", None, None) in marks(), "one pod needs no group"
