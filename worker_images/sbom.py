"""What is in an image, as a CycloneDX 1.6 document: its Python packages and its Debian packages, each with version, licence and purl.

Read from what is installed, so it tells what is there and not what was asked for. `build.py --sbom FOLDER` writes one file per image.
"""

import re
import uuid
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

SITE_PACKAGES = "opt/venv/lib/python3.11/site-packages"
DPKG_STATUS = "var/lib/dpkg/status"


def document(root: Path, *, name: str, version: str, revision: str) -> dict[str, Any]:
    """Return the document of the image whose files lie at `root`; equal files give an equal document.

    `name`, `version`: the image's and its tag; `revision`: the commit it was built from. Raises FileNotFoundError for a root without
    Python packages, which is none of our images.
    """
    if not (root / SITE_PACKAGES).is_dir():
        raise FileNotFoundError(
            f"{root} must hold /{SITE_PACKAGES}, found none; give the root of an image of this repository"
        )
    components = sorted((*_python(root), *_debian(root)), key=lambda component: component["purl"])
    subject = {"type": "container", "name": name, "version": version, "bom-ref": f"{name}:{version}"}
    serial = uuid.uuid5(uuid.NAMESPACE_URL, f"{name}:{version} {[component['purl'] for component in components]}")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": subject, "properties": [{"name": "revision", "value": revision}]},
        "components": components,
    }


def _python(root: Path) -> Iterator[dict[str, Any]]:
    for distribution in distributions(path=[str(root / SITE_PACKAGES)]):
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        yield _component(
            f"pkg:pypi/{name}@{quote(distribution.version)}", name, distribution.version, _licence(distribution)
        )


def _licence(distribution: Distribution) -> str:
    """Return the licence that a package tells, in SPDX's words where it has them; empty when it tells none."""
    expressions = distribution.metadata.get_all("License-Expression") or []
    classes = [
        line.rpartition(" :: ")[2] for line in distribution.metadata.get_all("Classifier") or [] if "License ::" in line
    ]
    return (expressions or [" AND ".join(classes)])[0]


def _debian(root: Path) -> Iterator[dict[str, Any]]:
    status = root / DPKG_STATUS
    for paragraph in status.read_text().split("\n\n") if status.is_file() else ():
        fields = dict(re.findall(r"^([A-Z][A-Za-z-]*): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            name, version = fields["Package"], fields["Version"]
            purl = f"pkg:deb/debian/{name}@{quote(version)}?arch={fields['Architecture']}"
            yield _component(purl, name, version, "")


def _component(purl: str, name: str, version: str, licence: str) -> dict[str, Any]:
    licences = {"licenses": [{"license": {"name": licence}}]} if licence else {}
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, **licences}
