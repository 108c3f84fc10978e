"""The images as a node runs them: unprivileged, without compilers, and each with all that its role needs."""

import json
import subprocess

import pytest

from tests.cluster.testcluster.access import Access

IMPORTS = {
    "actor": "rl_core.runner.__main__, rl_core.channel.__main__, rl_core.actors.fsdp, rl_core.actors.megatron.backend, torch, transformers, pyarrow, tensorboard",
    "rollout": "rl_core.rollouts.hf.worker, rl_core.rollouts.sglang.worker, rl_core.workers.host, torch, transformers",
    "env": "rl_core.envs.worker, rl_core.workers.host, math_verify, reasoning_gym, openai",
    "operator": "rljob_operator.__main__, kopf, kubernetes.aio",
}
LOOK = """
import json, os, pathlib, sys
def writable(path):
    try:
        pathlib.Path(path, "probe").touch()
    except OSError:
        return False
    return True
import %s
torch = sys.modules.get("torch")
names = {name for folder in os.environ["PATH"].split(":") if os.path.isdir(folder) for name in os.listdir(folder)}
print(json.dumps({
    "uid": os.getuid(), "writable": [path for path in ("/", "/opt/venv", "/tmp") if writable(path)],
    "tools": sorted(names & {"gcc", "cc", "g++", "c++", "clang", "make", "uv", "pip", "pip3"}),
    "torch": torch is not None, "gpus": torch.cuda.device_count() if torch else 0,
    "stale": [name for name, module in list(sys.modules.items()) if name.startswith("rl") and not getattr(module, "__cached__", None)],
    "devices": os.environ.get("NVIDIA_VISIBLE_DEVICES"),
}))
"""


def restricted_pod(name: str, image: str, command: list[str]) -> dict:
    """A pod of one command as the operator would confine it."""
    container = {
        "name": "main",
        "image": image,
        "command": command,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        "securityContext": {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    security = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {"restartPolicy": "Never", "automountServiceAccountToken": False, "securityContext": security}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {**spec, "containers": [container], "volumes": [{"name": "tmp", "emptyDir": {}}]},
    }


@pytest.fixture(scope="module")
def looks(nodes: Access, images: dict[str, str]) -> dict[str, dict]:
    """What a look around inside a pod of each image found; the image itself says who its user is."""
    nodes.kubectl("create", "namespace", "images")
    nodes.kubectl("wait", "--for=create", "serviceaccount/default", "-n", "images", "--timeout=180s")
    nodes.kubectl("label", "namespace", "images", "pod-security.kubernetes.io/enforce=restricted")
    pods = [restricted_pod(role, image, ["python", "-c", LOOK % IMPORTS[role]]) for role, image in images.items()]
    nodes.apply(*pods, namespace="images")
    found = {}
    for role in images:
        nodes.kubectl(
            "wait", f"pod/{role}", "-n", "images", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=600s"
        )
        found[role] = json.loads(nodes.kubectl("logs", role, "-n", "images").stdout.splitlines()[-1])
    nodes.kubectl("delete", "namespace", "images", "--wait=false")
    return found


@pytest.mark.parametrize("role", IMPORTS)
def test_an_image_runs_as_user_1000_and_writes_only_to_tmp(looks: dict[str, dict], role: str) -> None:
    assert (looks[role]["uid"], looks[role]["writable"]) == (1000, ["/tmp"])


@pytest.mark.parametrize("role", IMPORTS)
def test_an_image_holds_no_compiler_and_no_installer(looks: dict[str, dict], role: str) -> None:
    assert looks[role]["tools"] == []


@pytest.mark.parametrize("role", IMPORTS)
def test_an_image_holds_compiled_modules_as_its_root_is_read_only(looks: dict[str, dict], role: str) -> None:
    assert looks[role]["stale"] == []


def test_only_the_images_that_compute_hold_torch(looks: dict[str, dict]) -> None:
    assert {role: look["torch"] for role, look in looks.items()} == {
        "actor": True, "rollout": True, "env": False, "operator": False}  # fmt: skip


def test_env_and_operator_see_no_gpu_even_where_the_runtime_shows_all(looks: dict[str, dict]) -> None:
    assert looks["env"]["devices"] == looks["operator"]["devices"] == "void"
    assert looks["actor"]["devices"] is None


def test_actor_and_rollout_share_their_largest_layer(nodes: Access, images: dict[str, str]) -> None:
    def layers(role: str) -> dict[str, int]:
        address = nodes.cluster.state.addresses.registry
        repository, tag = images[role].removeprefix("registry.test/").split(":")
        accept = "Accept: application/vnd.oci.image.manifest.v1+json"
        words = ["curl", "--silent", "--fail", "--header", accept, f"http://{address}/v2/{repository}/manifests/{tag}"]
        text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        return {layer["digest"]: layer["size"] for layer in json.loads(text)["layers"]}

    actor, rollout = layers("actor"), layers("rollout")
    largest = max(rollout, key=rollout.__getitem__)
    assert largest in actor
    for one, other in ((rollout, actor), (actor, rollout)):
        assert sum(one[each] for each in one if each not in other) < one[largest] / 4
