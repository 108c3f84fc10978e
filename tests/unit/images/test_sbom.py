"""The list of what is in an image names each package that is installed there, by what scanners know it by."""

import json
from pathlib import Path

import pytest

from worker_images import sbom

DPKG = """Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u10
Description: library
 of C

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1
"""


def installed(root: Path, name: str, version: str, *more: str) -> None:
    folder = root / sbom.SITE_PACKAGES / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(
        "\n".join(["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *more]) + "\n"
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    installed(tmp_path, "Zope.Interface", "5.0", "Classifier: License :: OSI Approved :: Zope Public License")
    installed(tmp_path, "torch", "2.9.0+cu130", "License-Expression: BSD-3-Clause")
    (tmp_path / sbom.DPKG_STATUS).parent.mkdir(parents=True)
    (tmp_path / sbom.DPKG_STATUS).write_text(DPKG)
    return tmp_path


def test_python_and_debian_packages_are_named_with_version_and_licence(root: Path) -> None:
    found = sbom.document(root, name="rljob-env", version="abc", revision="c0ffee")
    assert {
        one["purl"]: one.get("licenses", [{}])[0].get("license", {}).get("name") for one in found["components"]
    } == {
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=amd64": None,
        "pkg:pypi/torch@2.9.0%2Bcu130": "BSD-3-Clause",
        "pkg:pypi/zope-interface@5.0": "Zope Public License",
    }
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    assert found["metadata"]["component"]["name"] == "rljob-env"


def test_equal_files_give_an_equal_document(root: Path) -> None:
    first, second = (sbom.document(root, name="n", version="v", revision="r") for _ in range(2))
    assert json.dumps(first) == json.dumps(second)
    installed(root, "new", "1")
    assert sbom.document(root, name="n", version="v", revision="r")["serialNumber"] != first["serialNumber"]


def test_a_folder_that_is_no_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="must hold /opt/venv"):
        sbom.document(tmp_path, name="n", version="v", revision="r")
