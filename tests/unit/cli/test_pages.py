"""What README.md and docs/ tell a reader to write or type is accepted as it stands."""

import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from rl_core.api.job import RLJob
from rl_core.cli.main import app
from rljob_operator.cli.commands import register

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
CLUSTER = typer.Typer()
register(CLUSTER)
COMMANDS = typer.main.get_command(app).commands | typer.main.get_command(CLUSTER).commands
README = (ROOT / "README.md").read_text()


def blocks(text, language=""):
    """Return the fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text):
    """Return the `rljob` commands of a page: lines of its blocks and code spans, without comments."""
    lines = [line for block in [*blocks(text), *blocks(text, "bash")] for line in block.splitlines()]
    spans = re.findall(r"`(rljob [^`|]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    for line in [*lines, *spans]:
        if match := re.match(r"\s*\$? ?(rljob [a-z].*)", line):
            yield re.split(r"  +|\s#|[|>]", match[1])[0].strip()


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
