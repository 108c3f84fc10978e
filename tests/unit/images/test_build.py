"""Equal tags mean equal content, and nothing else decides over a tag."""

from pathlib import Path

import pytest

from worker_images import build


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(build, "ROOT", tmp_path)
    (tmp_path / "code" / "sub").mkdir(parents=True)
    (tmp_path / "code" / "a.py").write_text("a")
    (tmp_path / "code" / "sub" / "b.py").write_text("b")
    (tmp_path / "Dockerfile").write_text("FROM x")
    return tmp_path


def tag() -> str:
    return build.content_hash(["Dockerfile", "code"], "cpu")


def test_an_untouched_tree_keeps_its_tag(tree: Path) -> None:
    before = tag()
    (tree / "code" / "a.py").touch()
    (tree / "code" / "__pycache__").mkdir()
    (tree / "code" / "__pycache__" / "a.pyc").write_text("compiled")
    (tree / "elsewhere").write_text("x")
    assert tag() == before


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: (tree / "code" / "a.py").write_text("b"),
        lambda tree: (tree / "code" / "a.py").rename(tree / "code" / "c.py"),
        lambda tree: (tree / "code" / "sub" / "new.py").write_text(""),
        lambda tree: (tree / "code" / "sub" / "b.py").unlink(),
        lambda tree: (tree / "Dockerfile").write_text("FROM y"),
    ],
    ids=["content", "name", "new file", "removed file", "Dockerfile"],
)
def test_any_change_of_what_is_in_an_image_changes_its_tag(tree: Path, change) -> None:
    before = tag()
    change(tree)
    assert tag() != before


def test_the_accelerator_is_part_of_the_tag(tree: Path) -> None:
    assert build.content_hash(["code"], "cpu") != build.content_hash(["code"], "cuda")


def test_a_missing_input_is_named(tree: Path) -> None:
    with pytest.raises(build.BuildError, match="absent must be there to build the images"):
        build.content_hash(["absent"])


def test_every_image_names_files_that_exist() -> None:
    for image in build.IMAGES.values():
        for accelerator in ("cpu", "cuda"):
            paths = [image.dockerfile, *image.code, *(path.format(accelerator=accelerator) for path in image.packages)]
            assert all((build.ROOT / path).exists() for path in paths)
