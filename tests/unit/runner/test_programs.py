"""Which program runs a job, and what is told of a program or a worker class that cannot be used."""

import pytest

from rl_core.api.errors import ConfigError
from rl_core.api.job import BUILT_IN_PROGRAMS, RLJobSpec
from rl_core.runner.program_check import check_program
from rl_core.runner.programs import PROGRAMS, load_program, program_name

CODE = """
from rl_core.runner.group_program import GroupProgram
from rl_core.workers.worker import Worker

class Good(GroupProgram):
    def loop(self): ...

class NoLoop(GroupProgram): ...

class Judge(Worker):
    def __init__(self, config): ...

class Greedy(Worker):
    def __init__(self, config, model): ...

class Shadow(Worker):
    def __init__(self, config): ...
    def launch(self): ...

class Plain: ...
"""
BROKEN = "raise RuntimeError('no such device')"


def spec(**blocks):
    return RLJobSpec.model_validate({"model": {"path": "m"}, "data": {"train": "d.jsonl"}} | blocks)


def test_the_schema_knows_the_programs_of_the_table_and_each_can_be_loaded():
    assert tuple(PROGRAMS) == BUILT_IN_PROGRAMS
    assert [load_program(name).__name__ for name in PROGRAMS] == [
        "ReasoningRunner",
        "AsyncReasoningRunner",
        "EmbodiedRunner",
        "AsyncEmbodiedRunner",
    ]


@pytest.mark.parametrize(
    ("blocks", "name"),
    [
        ({}, "reasoning"),
        ({"algorithm": {"maxStaleness": 1}}, "asynchronous"),
        ({"program": "reasoning"}, "reasoning"),
        ({"program": "mine:Loop", "algorithm": {"maxStaleness": 1}}, "mine:Loop"),
    ],
)
def test_the_program_is_the_one_named_else_that_of_the_staleness(blocks, name):
    assert program_name(spec(**blocks)) == name


def test_a_name_that_is_no_program_is_refused():
    with pytest.raises(
        ConfigError,
        match="must be one of reasoning, asynchronous, embodied, embodied_async or module:Class, got 'other'",
    ):
        load_program("other")


@pytest.fixture
def problems(tmp_path):
    (tmp_path / "own.py").write_text(CODE)
    (tmp_path / "broken.py").write_text(BROKEN)

    def check(program, *workers):
        groups = [{"name": f"g{index}", "worker": worker} for index, worker in enumerate(workers)]
        return list(check_program(spec(program=program, groups=groups), search_path=str(tmp_path)))

    return check


def test_a_program_and_a_worker_that_can_be_used_have_no_problem(problems):
    assert problems("own:Good", "own:Judge") == []


def test_each_problem_is_told_with_field_rule_value_and_way_out(problems):
    found = problems("own:NoLoop", "own:Greedy", "own:Shadow", "own:Plain", "own:Nobody", "broken:Judge")
    expected = [
        ("spec.program: must define loop", "own:NoLoop"),
        ("spec.groups.g0.worker: must be constructed with config alone", "missing a required argument: 'model'"),
        ("spec.groups.g1.worker: Shadow must not define launch", "rename them"),
        ("spec.groups.g2.worker: Plain must derive from rl_core.workers.worker.Worker", ""),
        ("spec.groups.g3.worker: must exist, got 'own:Nobody'", "it defines Good, Greedy"),
        ("spec.groups.g4.worker: must be importable, got 'broken'", "no such device"),
    ]
    assert len(found) == len(expected)
    for problem, (beginning, part) in zip(found, expected, strict=True):
        assert problem.startswith(beginning) and part in problem, problem


def test_a_program_that_is_none_is_named(problems):
    (problem,) = problems("own:Plain")
    assert problem.startswith("spec.program: must be a subclass of rl_core.runner.program.Program, got 'own:Plain'")


@pytest.mark.parametrize(("code", "end"), [("os._exit(0)", 0), ("os._exit(5)", 5), ("os.kill(os.getpid(), 11)", -11)])
def test_a_program_that_ends_the_process_which_imports_it_is_a_problem_and_no_end_of_the_check(tmp_path, code, end):
    (tmp_path / "own.py").write_text(f"import os, sys\nprint('note', file=sys.stdout)\n{code}")
    (problem,) = check_program(spec(program="own:Loop"), search_path=str(tmp_path))
    assert problem == (
        f"spec.program: must not end its process, got own:Loop, which ended it with code {end}; correct it"
    )
