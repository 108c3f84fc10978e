"""`rljob init`: writes a job, a stub of the user's code, example data and a README, which run as they are."""

import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import typer

from rl_core.api.errors import ConfigError
from rl_core.api.similar import did_you_mean
from rl_core.cli.run import device_sizes
from rl_core.data.hub import HUB_SCHEME
from rl_core.data.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parent / "templates"
DEFAULT_MODEL = f"{HUB_SCHEME}Qwen/Qwen2.5-0.5B-Instruct"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
PLAIN_CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}\\n{% endfor %}"
TRAIN_ROWS, VALIDATION_ROWS = 256, 32
MAX_LENGTH = 1024
"""Tokens of a sequence, unless the model takes fewer."""

Row = dict[str, Any]


def _addition(chance: random.Random) -> Row:
    a, b = chance.randint(10, 99), chance.randint(10, 99)
    return {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)}


def _secret_number(chance: random.Random) -> Row:
    return {
        "prompt": [{"role": "user", "content": "Guess a number from 1 to 20."}],
        "answer": str(chance.randint(1, 20)),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A kind of job that can be written."""

    title: str
    """First line of the job and of the README."""
    env: str
    """The block `env` of the job."""
    code: str | None
    """Name of the file with the user's code; None = the task needs none."""
    yours: str
    """What the README says about the user's code."""
    row: Callable[[random.Random], Row] = _addition
    """Makes a row of example data."""
    turns: int = 1
    """Largest number of replies of the model in one sample."""


TASKS: Mapping[str, Task] = {
    "math": Task(
        title="GRPO on questions that have one right answer",
        env="  env: {type: math, options: {comparator: numeric}}    # the last number of a completion; math_verify reads LaTeX",
        code=None,
        yours="An answer is right when its last number equals the column `answer`; rljob's docs/writing-an-env.md has other comparators.",
    ),
    "reward": Task(
        title="GRPO with a reward function of your own",
        env='  env: {type: reward, reward: "reward:score"}    # the function `score` of reward.py',
        code="reward.py",
        yours="`reward.py` scores completions: change `score`. rljob's docs/writing-an-env.md says what it may take and return.",
    ),
    "multi-turn": Task(
        title="GRPO in an environment of several turns",
        env='  env: {type: "environment:Guess", maxTurns: 5}    # the class `Guess` of environment.py',
        code="environment.py",
        yours="`environment.py` answers the model and scores it: change `Guess`. rljob's docs/writing-an-env.md says what `step` takes and returns.",
        row=_secret_number,
        turns=5,
    ),
    "agent": Task(
        title="GRPO of the model behind an agent program",
        env='  env: {type: agent, agent: "agent:run", processes: 2}    # the function `run` of agent.py',
        code="agent.py",
        yours="`agent.py` calls the model with an OpenAI client and returns a reward: change `run`. rljob's docs/agents.md says what is trained.",
        turns=3,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What is known of the model of a new job."""

    path: str
    """Absolute folder, or a reference to the hub."""
    max_length: int
    """Tokens that the model takes, at most MAX_LENGTH."""
    has_chat_template: bool
    """Whether its tokenizer renders messages. Models of the hub are taken to have a template; the start of a run refuses others."""


def init(folder: Path | None, *, task: str | None, model: str | None, gpus: int | None) -> int:
    """Write a new job; return 0. What is None is asked for on a terminal. Raises ConfigError, and then writes nothing."""
    is_interactive = sys.stdin.isatty()
    if task is None and is_interactive:
        task = typer.prompt(f"Task ({', '.join(TASKS)})", default="reward")
    if task is None or task not in TASKS:
        raise ConfigError(
            f"--task must be one of {', '.join(TASKS)}, got {task or 'none'}; choose one{did_you_mean(task or '', TASKS)}"
        )
    if model is None:
        model = (
            typer.prompt("Model (a folder or hf://owner/name)", default=DEFAULT_MODEL)
            if is_interactive
            else DEFAULT_MODEL
        )
    if folder is None:
        folder = Path(typer.prompt("Folder", default=f"my-{task}")) if is_interactive else Path(f"my-{task}")
    files = dict(
        job_files(folder.resolve().name, TASKS[task], inspect(model), len(device_sizes()) if gpus is None else gpus)
    )
    _write(folder, files)
    sys.stdout.write("".join(f"wrote {folder / name}\n" for name in files))
    sys.stdout.write(
        f"next: cd {folder}; rljob validate job.yaml; rljob plan job.yaml; rljob run job.yaml --output out\n"
    )
    return 0


def inspect(reference: str) -> Model:
    """Return the facts about a model that `rljob init` needs. Raises ConfigError if `reference` is neither a model folder nor a hub name."""
    folder = Path(reference).expanduser()
    if reference.startswith(HUB_SCHEME) or (HUB_NAME.fullmatch(reference) and not folder.exists()):
        return Model(
            path=HUB_SCHEME + reference.removeprefix(HUB_SCHEME), max_length=MAX_LENGTH, has_chat_template=True
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model must be a folder with config.json or hf://owner/name, got {reference}; correct it")
    config = json.loads((folder / "config.json").read_text())
    return Model(
        path=str(folder.resolve()),
        max_length=min(MAX_LENGTH, config.get("max_position_embeddings") or MAX_LENGTH),
        has_chat_template=bool(Tokenizer.from_folder(folder).chat_template),
    )


def job_files(name: str, task: Task, model: Model, gpus: int) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of each file of a new job in a folder `name`, for a machine with `gpus` accelerators."""
    comment = "    # renders messages as lines of text; this model has no template of its own"
    values = {
        "title": task.title,
        "name": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-") or "job",
        "model": json.dumps(model.path),
        "dtype": "bfloat16" if gpus else "float32",
        "chat_template": "" if model.has_chat_template else f'\n    chatTemplate: "{PLAIN_CHAT_TEMPLATE}"{comment}',
        "prompts": 16 if gpus else 4,
        "group": 8 if gpus else 4,
        "steps": 100 if gpus else 20,
        "placement": "  placement: {mode: colocated}           # actor and rollout take turns on one accelerator\n"
        * (gpus == 1),
        "gpus": min(gpus, 1),
        "memory": "    gradientCheckpointing: true          # less memory for a slower step; `rljob plan job.yaml` says how much\n"
        * (gpus > 0),
        "engine": "sglang"
        if gpus
        else "hf                           # rljob's own; sglang is quicker on an accelerator",
        "length": f"{model.max_length:<4}",
        "new_tokens": min(256 if gpus else 64, model.max_length // (4 if task.turns == 1 else 2 * task.turns)),
        "environment": task.env,
        "yours": task.yours,
    }
    templates = {"job.yaml": "job.yaml", "README.md": "README.md", **({task.code: task.code} if task.code else {})}
    for path, source in templates.items():
        text = (TEMPLATES / f"{source}.txt").read_text()
        yield path, text if path == task.code else Template(text).substitute(values)
    chance = random.Random(0)
    for part, count in (("train", TRAIN_ROWS), ("validation", VALIDATION_ROWS)):
        yield f"data/{part}.jsonl", "".join(json.dumps(task.row(chance)) + "\n" for _ in range(count))


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files below `folder`. Raises ConfigError when one is there already, before anything is written."""
    existing = [name for name in files if (folder / name).exists() or (folder / name).is_symlink()]
    if existing:
        raise ConfigError(
            f"{folder} must not hold {', '.join(existing)}: init overwrites nothing; choose another folder"
        )
    for name, text in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(f"{path} must be writable, got {error.strerror}; choose another folder") from error
