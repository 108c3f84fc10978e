"""Code of the user by name: modules with `register()`, `module:object`, and failures reported with their cause."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl_core.api.errors import ConfigError
from rl_core.api.user_code import import_reference, load_extensions, own_frames, place_of_main_thread


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    """Write a module of the user; returns its name, another one for each test."""
    name = f"user_code_{abs(hash(request.node.name))}"
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


FAILURES = pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1 / 0", r"ZeroDivisionError: division by zero \(user_code_\d+\.py:1 in <module>\); correct the module"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("def f(:", "SyntaxError"),
        ("import user_dependency", "ModuleNotFoundError: No module named 'user_dependency'.*install what it needs"),
    ],
    ids=["raises", "exits", "syntax", "dependency"],
)


@FAILURES
def test_a_module_that_fails_to_import_is_reported_with_its_cause(module, text, message):
    name = module(text)
    with pytest.raises(ConfigError, match=rf"^env\.reward: must be importable, got '{name}': {message}"):
        import_reference(f"{name}:f", field="env.reward")
    with pytest.raises(ConfigError, match=rf"^extensions: must be importable, got '{name}': {message}"):
        load_extensions([name])


def test_a_module_that_is_not_there_says_where_it_is_looked_for():
    with pytest.raises(
        ConfigError, match=r"got 'user_nowhere\.deep', which was not found; put user_nowhere\.py beside"
    ):
        load_extensions(["user_nowhere.deep"])


def test_an_object_that_is_not_there_is_reported_with_those_that_are(module):
    name = module("def score(): ...\ndef _hidden(): ...\nnumber = 1")
    with pytest.raises(ConfigError, match="has no 'scor'; it defines score$"):
        import_reference(f"{name}:scor", field="env.reward")
    assert import_reference(f"{name}:score.__name__", field="env.reward") == "score"


def test_a_traceback_begins_with_the_users_code_and_goes_on_in_libraries(module):
    name = module("import json\ndef outer():\n    helper()\ndef helper():\n    json.loads('{')")
    with pytest.raises(ValueError, match="Expecting") as failure:
        import_reference(f"{name}:outer", field="env.reward")()
    trace = failure.value.__traceback__.tb_next  # without the frame of this test
    frames = [
        line.rpartition(" in ")[2]
        for line in own_frames(failure.value.with_traceback(trace)).splitlines()
        if line.startswith("  File")
    ]
    assert frames[:3] == ["outer", "helper", "loads"]


@pytest.mark.parametrize("reference", ["module", "module:", ":name"])
def test_a_reference_names_module_and_object(reference):
    with pytest.raises(ConfigError, match=r"must have the form module:name"):
        import_reference(reference, field="env.reward")


@pytest.mark.parametrize("reference", ["score.py:correct", "./score.py:correct", "rewards/score.py:correct"])
def test_a_file_in_place_of_a_module_gets_the_name_of_the_module(reference):
    with pytest.raises(
        ConfigError, match=r"name a module and not a file, got .*; write score:correct, with score\.py beside"
    ):
        import_reference(reference, field="env.reward")


def test_a_module_is_imported_and_its_register_called_where_it_has_one(module):
    name = module("done = []\ndef register(): done.append(1)")
    load_extensions([name, "json"])
    assert __import__(name).done == [1]


@pytest.mark.parametrize("code", ["raise KeyError('x')", "raise SystemExit('x')"])
def test_a_register_that_fails_is_bad_input(module, code):
    name = module(f"def register(): {code}")
    with pytest.raises(ConfigError, match=rf"^extensions: register\(\) of '{name}' must not fail, got \w+: '?x'?"):
        load_extensions([name])


def test_the_line_that_the_main_thread_runs_is_named_to_other_threads():
    with ThreadPoolExecutor(1) as other:
        place = other.submit(place_of_main_thread).result(60)
    assert re.fullmatch(
        r"test_user_code\.py:\d+ in test_the_line_that_the_main_thread_runs_is_named_to_other_threads", place
    )
