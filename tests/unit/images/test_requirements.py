"""What is in the images is what was tested, and the four Dockerfiles stay one family."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "worker_images" / "requirements"
IMAGES = (
    "torch-cuda.txt",
    "torch-cpu.txt",
    "actor.txt",
    "rollout-cuda.txt",
    "rollout-cpu.txt",
    "env.txt",
    "operator.txt",
)
COMPILED = (*IMAGES, "build.txt")
DOCKERFILES = (
    "Dockerfile.actor",
    "Dockerfile.rollout",
    "worker_images/Dockerfile.env",
    "worker_images/Dockerfile.operator",
)


def pins(path: Path) -> set[str]:
    return {line.split(" ")[0] for line in path.read_text().splitlines() if re.match(r"[a-z0-9]", line)}


def names(path: Path) -> set[str]:
    return {pin.partition("==")[0] for pin in pins(path)}


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_holds_the_versions_of_the_environment_that_the_tests_run_in(name: str) -> None:
    assert pins(FOLDER / name)
    assert pins(FOLDER / name) <= pins(ROOT / "requirements" / "all.txt")


@pytest.mark.parametrize("path", [ROOT / "requirements" / "all.txt", *(FOLDER / name for name in COMPILED)], ids=str)
def test_each_requirement_has_the_digests_of_its_files_and_no_file_an_address(path: Path) -> None:
    text = path.read_text()
    blocks = re.split(r"^(?=\S)", text, flags=re.MULTILINE)[1:]
    assert len(blocks) == len(pins(path))
    assert not [block for block in blocks if not re.search(r"^    --hash=sha256:[0-9a-f]{64}", block, re.MULTILINE)]
    assert "://" not in text


@pytest.mark.parametrize("name", ["Makefile", *DOCKERFILES])
def test_what_installs_them_accepts_no_file_without_its_digest(name: str) -> None:
    words = re.findall(r"pip (?:install|sync) (?:.*) [^ ]*(?:requirements|build)/[^ ]*\.txt", (ROOT / name).read_text())
    assert words
    assert all("--require-hashes" in each for each in words)


@pytest.mark.parametrize("name", ["torch-cuda.txt", "torch-cpu.txt", "actor.txt"])
def test_the_actor_and_what_it_shares_come_without_the_engine(name: str) -> None:
    assert not names(FOLDER / name) & names(FOLDER / "not-in-torch.txt")


@pytest.mark.parametrize(
    ("name", "brings"), [("actor.txt", "megatron-core"), ("rollout-cuda.txt", "sglang"), ("rollout-cpu.txt", "sglang")]
)
def test_actor_and_rollout_add_packages_to_the_layer_of_torch_and_replace_none(name: str, brings: str) -> None:
    assert brings in names(FOLDER / name)
    assert not names(FOLDER / name) & names(FOLDER / "torch-cuda.txt")


def test_the_cpu_variant_of_torch_lacks_the_cuda_libraries_alone() -> None:
    cuda, cpu = pins(FOLDER / "torch-cuda.txt"), pins(FOLDER / "torch-cpu.txt")
    assert cpu < cuda
    assert {pin.partition("==")[0] for pin in cuda - cpu} == names(FOLDER / "cuda-only.txt")


def test_the_cpu_variant_of_the_rollout_lacks_what_a_list_names_and_adds_nothing() -> None:
    cuda, cpu = pins(FOLDER / "rollout-cuda.txt"), pins(FOLDER / "rollout-cpu.txt")
    assert cpu < cuda
    assert names(FOLDER / "not-on-cpu.txt") < {pin.partition("==")[0] for pin in cuda - cpu}


@pytest.mark.parametrize("name", ["env.txt", "operator.txt"])
def test_env_and_operator_come_without_torch_and_cuda(name: str) -> None:
    assert not {each for each in names(FOLDER / name) if each == "torch" or each.startswith("nvidia-cu")}


def test_the_dockerfiles_share_their_first_stages_so_that_they_are_built_once() -> None:
    stages = {}
    for name in DOCKERFILES:
        text = (ROOT / name).read_text()
        stages[name] = text[
            text.index("FROM ${BUILD_BASE}") : text.index("uv pip install --quiet --python /opt/venv --prefix /code")
        ]
    assert len(set(stages.values())) == 1


def test_actor_and_rollout_share_the_stage_that_installs_torch() -> None:
    stages = []
    for name in ("Dockerfile.actor", "Dockerfile.rollout"):
        text = (ROOT / name).read_text()
        start = text.index("FROM build AS torch")
        stages.append(text[start : text.index("\n\n", start)])
    assert stages[0] == stages[1]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_runs_as_user_1000(name: str) -> None:
    users = re.findall(r"^USER (.*)$", (ROOT / name).read_text(), re.MULTILINE)
    assert users == ["1000:1000"]
