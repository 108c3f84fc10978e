"""What README.md and docs/ tell a reader to write or type is accepted as it stands."""

import functools
import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from rl_core.api.job import RLJob
from rl_core.cli.main import app
from rl_core.cli.problems import find_problems
from rljob_operator.cli.commands import register

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
CLUSTER = typer.Typer()
register(CLUSTER)
COMMANDS = typer.main.get_command(app).commands | typer.main.get_command(CLUSTER).commands
README = (ROOT / "README.md").read_text()
BASE = {"model": {"path": "model"}, "data": {"train": "train.jsonl"}}
"""What a fragment of a job on a page leaves out."""
NOT_A_JOB = "<!-- not part of a job -->\n"
"""Stands before YAML that belongs to another program."""


def blocks(text, language=""):
    """Return the fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text):
    """Return the `rljob` commands of a page: lines of its blocks and code spans, without comments."""
    spans = re.findall(r"`(rljob [^`|]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    for line in [*shell_lines(text), *spans]:
        if match := re.match(r"\s*\$? ?(rljob [a-z].*)", line):
            yield re.split(r"  +|\s#|[|>]", match[1])[0].strip()


def shell_lines(text):
    """Return the lines of the blocks of a page that show commands: fenced without a language or as a shell's, or indented by four."""
    fenced = [block for language in ("", "bash", "sh") for block in blocks(text, language)]
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [line for block in [*fenced, *re.findall(r"^    (.*)$", rest, re.MULTILINE)] for line in block.splitlines()]


def yaml_documents(page):
    """Return the YAML documents of a page, other than those of other programs."""
    text = page.read_text()
    for match in re.finditer(r"^```ya?ml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if not text[: match.start()].endswith(NOT_A_JOB):
            yield from yaml.safe_load_all(match[1])


def test_the_job_of_the_readme_is_valid():
    (text,) = blocks(README, "yaml")
    assert RLJob.model_validate(yaml.safe_load(text)).spec.env.reward == "reward:score"


def test_the_reward_of_the_readme_scores_the_last_number():
    (text,) = blocks(README, "python")
    module = {}
    exec(text, module)
    completions = ["6 * 7 = 42, so 42", "It is 1,042.", "no idea"]
    assert module["score"](["?"] * 3, completions, ["6*7 #### 42", "#### 1042", "#### 3"]) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_command_of_a_page_exists_with_its_options(page):
    for line in commands(page.read_text()):
        _, name, *words = shlex.split(line)
        assert set(name.split(",")) <= set(COMMANDS), line
        options = {
            option for parameter in COMMANDS[name].params for option in [*parameter.opts, *parameter.secondary_opts]
        }
        given = {word.split("=")[0] for word in words if word.startswith("-") and word != "-"}
        assert given <= options, f"{line}: {given - options}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_job_and_each_fragment_of_one_on_a_page_is_valid(page):
    for document in yaml_documents(page):
        if document.get("kind") not in (None, "RLJob"):
            continue  # an object of Kubernetes
        spec = document.get("spec", document)
        whole = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "page"}} | document
        data = {} if "sets" in spec.get("data", {}) else BASE["data"]
        spec = BASE | spec | {"data": data | spec.get("data", {}), "model": BASE["model"] | spec.get("model", {})}
        whole = {key: whole[key] for key in ("apiVersion", "kind", "metadata")} | {"spec": spec}
        assert find_problems(whole)[1] == [], yaml.safe_dump(document)


def test_the_index_of_the_pages_names_each_of_them():
    index = (ROOT / "docs/README.md").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").glob("**/*.md")} - {"README.md"}
    assert pages == set(re.findall(r"^- \[[\w/.-]+\]\(([\w/.-]+)\):", index, re.MULTILINE))


def test_pages_show_yaml_in_fenced_blocks_only():
    """An indented block would not be validated."""
    for page in PAGES:
        rest = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert re.findall(r"\n\n    [a-zA-Z]+:(?: \S.*)?\n", rest) == [], page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_targets_of_make_scripts_and_values_of_the_chart_on_a_page_exist(page):
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    values = yaml.safe_load((ROOT / "helm/rljob/values.yaml").read_text())
    text = page.read_text().replace("\\\n", " ")
    for line in [*shell_lines(text), *re.findall(r"`([^`\n]+)`", text)]:
        if match := re.match(r"\s*make ((?:[a-z0-9-]+ ?)+?)(?:\s{2,}|\s#|$)", line):
            assert set(match[1].split()) <= targets, line
        if match := re.match(r"\s*(?:\S*/)?python (?:-m ((?:worker_images|tests|rl_core)\.[a-z_.]+)|(\S+\.py))", line):
            module = f"{match[1].replace('.', '/')}.py" if match[1] else match[2]
            assert any((folder / module).is_file() for folder in (ROOT, page.parent)), line
        for path in re.findall(r"--set '?([a-zA-Z.]+)=", line) if "helm " in line else ():
            assert functools.reduce(lambda found, part: found[part], path.split("."), values) is not None, line
