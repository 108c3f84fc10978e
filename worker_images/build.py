"""Build the images of this repository with buildah, and push them to a registry.

    python -m worker_images.build [--push ADDRESS] [--accelerator cuda] [--base IMAGE --build-base IMAGE] [--sbom FOLDER] [ROLE ...]

Prints {"actor": REFERENCE, ...} on standard output, progress on standard error. Images are tagged with a hash of what they are made of: an
image that is there is not built again, and an equal tag means equal content. A base is pulled and built on by its digest, whatever its tag
means tomorrow; labels tell base, source and revision. Without --base it makes a Debian base of its own out of packages
(debian_base.sh), as some machines reach no image registry. Needs root and buildah.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from worker_images import sbom

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "worker_images"
CERTIFICATES = Path(os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt"))
CONTAINER_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
CODE = ("pyproject.toml", "README.md", "rl_core", "operator")
SOURCE = "https://github.com/rljob/rljob"
ENVIRONMENT = {"STORAGE_DRIVER": "overlay", "BUILDAH_ISOLATION": "chroot"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """One image of the repository."""

    dockerfile: str
    packages: tuple[str, ...]
    """Files that decide over its packages, besides the Dockerfile."""
    code: tuple[str, ...] = CODE
    """Files and folders of the repository that are in it."""


_REQUIREMENTS = "worker_images/requirements/{}.txt"
_TORCH = (_REQUIREMENTS.format("torch-{accelerator}"), "worker_images/without_cuda.py")
IMAGES = {
    "rollout": Image(
        dockerfile="Dockerfile.rollout", packages=(*_TORCH, _REQUIREMENTS.format("rollout-{accelerator}"))
    ),
    "actor": Image(
        dockerfile="Dockerfile.actor",
        packages=(*_TORCH, _REQUIREMENTS.format("actor")),
        code=(*CODE, "examples/arithmetic/prepare.py"),
    ),
    "env": Image(dockerfile="worker_images/Dockerfile.env", packages=(_REQUIREMENTS.format("env"),)),
    "operator": Image(dockerfile="worker_images/Dockerfile.operator", packages=(_REQUIREMENTS.format("operator"),)),
}


class BuildError(Exception):
    """The images cannot be built; the text says what to do."""


def content_hash(paths: Sequence[str], *more: str) -> str:
    """Return 16 hexadecimal digits over the files under `paths` (names and content) and `more`."""
    digest = hashlib.sha256(json.dumps(more).encode())
    for path in paths:
        for file in _files(ROOT / path):
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            digest.update(f"{file.relative_to(ROOT)} {content}\n".encode())
    return digest.hexdigest()[:16]


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from (file for file in sorted(path.rglob("*")) if file.is_file() and "__pycache__" not in file.parts)
    else:
        raise BuildError(f"{path} must be there to build the images, found nothing; restore it")


class Builder:
    """buildah's store on this machine."""

    def __init__(self, *, accelerator: str, base: str | None, build_base: str | None) -> None:
        self._accelerator = accelerator
        if base:
            self._base = self._pinned(base)
            self._build_base = self._pinned(build_base) if build_base else self._base
        else:
            self._base, self._build_base = self._debian_base()

    def image(self, role: str) -> str:
        """Return the local name of the role's image, built when it is not there: its packages, then the code on top of them."""
        image = IMAGES[role]
        inputs = [path.format(accelerator=self._accelerator) for path in image.packages]
        bases = (self._accelerator, self._base, self._build_base)
        packages = f"localhost/rljob-{role}-packages:{content_hash([image.dockerfile, *inputs], *bases)}"
        self._build(packages, image.dockerfile, "--target", "packages")
        name = f"localhost/rljob-{role}:{content_hash(image.code, packages)}"
        labels = (argument for key, value in self._labels().items() for argument in ("--label", f"{key}={value}"))
        self._build(name, image.dockerfile, "--build-context", f"packages=container-image://{packages}", *labels)
        return name

    def _labels(self) -> dict[str, str]:
        """Return what an image tells of where it comes from: the base by its digest, this repository and its commit."""
        base, _, digest = self._base.partition("@")
        return {
            "org.opencontainers.image.source": SOURCE,
            "org.opencontainers.image.revision": revision(),
            "org.opencontainers.image.base.name": base,
            "org.opencontainers.image.base.digest": digest or self._digest(base),
        }

    def _pinned(self, base: str) -> str:
        """Return a base as `name@digest`; its tag is looked up once, here."""
        if "@" in base:
            return base
        with _Timed(f"pull {base}"):
            self._run("pull", "--quiet", base)
        image_name = base.rpartition("/")[2]
        return f"{base.removesuffix(':' + image_name.partition(':')[2]) if ':' in image_name else base}@{self._digest(base)}"

    def _digest(self, name: str) -> str:
        return self._output("inspect", "--type", "image", "--format", "{{.FromImageDigest}}", name)

    def sbom(self, role: str, name: str, folder: Path) -> Path:
        """Write what is in a local image to `folder` as CycloneDX; return the file."""
        container = self._output("from", "--pull-never", name)
        try:
            root = Path(self._output("mount", container))
            document = sbom.document(root, name=f"rljob-{role}", version=name.rpartition(":")[2], revision=revision())
        finally:
            self._output("rm", container)
        path = folder / f"{role}.cdx.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")
        return path

    def _build(self, name: str, dockerfile: str, *options: str) -> None:
        """Build `name` when it is not there, and untag what it replaces; layers they share stay."""
        if self._exists(name):
            return
        with _Timed(f"build {name}"):
            self._run("build", *self._options(), *options, "--file", dockerfile, "--tag", name, ".")
        repository = name.rpartition(":")[0]
        older = self._output("images", "--format", "{{.Name}}:{{.Tag}}", "--filter", f"reference={repository}")
        for old_image in older.splitlines():
            if old_image != name:
                self._run("rmi", "--force", old_image)

    def push(self, role: str, name: str, *, address: str, registry: str) -> str:
        """Push a local image to the registry at `address`; return the reference for pods.

        All go to one repository, in which the layers that they share are sent and compressed once.
        """
        reference = f"rljob:{role}-{name.rpartition(':')[2]}"
        fast = ("--compression-format", "zstd", "--compression-level", "1")
        with _Timed(f"push {reference} to {address}"):
            self._run("push", "--quiet", "--tls-verify=false", *fast, name, f"docker://{address}/{reference}")
        return f"{registry}/{reference}"

    def _debian_base(self) -> tuple[str, str]:
        tag = content_hash(["worker_images/debian_base.sh"])
        runtime, build = f"localhost/rljob-base:{tag}", f"localhost/rljob-build-base:{tag}"
        if not (self._exists(runtime) and self._exists(build)):
            _require("debootstrap")
            with _Timed(f"make {runtime}"):
                _call([str(HERE / "debian_base.sh"), runtime, build])
        return runtime, build

    def _options(self) -> Iterator[str]:
        """Yield options of a build; the machine's certificates and uv's cache are there while it runs, and not in the image."""
        yield from ("--layers", "--quiet")
        arguments = {"BASE": self._base, "BUILD_BASE": self._build_base, "ACCELERATOR": self._accelerator}
        if CERTIFICATES.is_file():
            yield from ("--volume", f"{CERTIFICATES}:{CONTAINER_CERTIFICATES}:ro")
        cache = _uv_cache()
        if cache is not None:
            arguments["UV_CACHE_DIR"] = "/uv-cache"
            yield from ("--volume", f"{cache}:/uv-cache")
        for key, value in arguments.items():
            yield from ("--build-arg", f"{key}={value}")

    def _exists(self, name: str) -> bool:
        return self._output("images", "--quiet", "--filter", f"reference={name}") != ""

    def _run(self, command: str, *words: str) -> None:
        _call(["buildah", command, *words])

    def _output(self, command: str, *words: str) -> str:
        return _call(["buildah", command, *words], stdout=subprocess.PIPE).strip()


def revision() -> str:
    """Return the commit of this tree, with `-dirty` when it has changes of its own; `unknown` outside of a clone."""
    process = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return process.stdout.strip() or "unknown"


def _call(command: list[str], *, stdout: int | None = None) -> str:
    """Run a program in the repository's root, its output to standard error unless captured; return what was captured."""
    process = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        stdout=stdout or sys.stderr,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    if process.returncode:
        raise BuildError(f"{' '.join(command)} must end with code 0, got {process.returncode}; see its output above")
    return process.stdout or ""


def _uv_cache() -> Path | None:
    """Return uv's cache, from which the environment was made: a build then downloads nothing."""
    if shutil.which("uv") is None:
        return None
    folder = Path(_call(["uv", "cache", "dir"], stdout=subprocess.PIPE).strip())
    return folder if folder.is_dir() else None


def _require(program: str) -> None:
    if shutil.which(program) is None:
        raise BuildError(
            f"{program} must be installed to build the images; apt-get install --no-install-recommends {program}"
        )


class _Timed:
    """Says on standard error what runs and how long it took."""

    def __init__(self, what: str) -> None:
        self._description = what

    def __enter__(self) -> None:
        self._start = time.monotonic()
        sys.stderr.write(f"{self._description} ...\n")

    def __exit__(self, *error: object) -> None:
        sys.stderr.write(f"{self._description}: {time.monotonic() - self._start:.1f} s\n")


def main() -> int:
    """Build what the command line asks for and print the references."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("roles", nargs="*", metavar="ROLE", help=f"default: {' '.join(IMAGES)}")
    parser.add_argument(
        "--accelerator", choices=("cpu", "cuda"), default="cpu", help="cpu leaves out the CUDA libraries"
    )
    parser.add_argument("--base", help="a Debian 12 image with Python 3.11; default: one made of packages")
    parser.add_argument("--build-base", help="the same with pip; default: BASE")
    parser.add_argument("--push", metavar="ADDRESS", help="host:port of a registry without TLS")
    parser.add_argument("--registry", default="registry.test", help="the name by which nodes know that registry")
    parser.add_argument("--sbom", metavar="FOLDER", type=Path, help="write ROLE.cdx.json, what is in each image, there")
    options = parser.parse_args()
    try:
        if unknown := set(options.roles) - set(IMAGES):
            raise BuildError(f"ROLE must be one of {', '.join(IMAGES)}, got {', '.join(sorted(unknown))}; correct it")
        if os.geteuid() != 0:
            raise BuildError(
                f"images must be built as root (buildah's chroot isolation), got uid {os.geteuid()}; use sudo"
            )
        _require("buildah")
        builder = Builder(accelerator=options.accelerator, base=options.base, build_base=options.build_base)
        references = {}
        for role in options.roles or IMAGES:
            name = builder.image(role)
            pushed = options.push and builder.push(role, name, address=options.push, registry=options.registry)
            references[role] = pushed or name
            if options.sbom:
                sys.stderr.write(f"{builder.sbom(role, name, options.sbom)} tells what is in {name}\n")
    except BuildError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(references) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
