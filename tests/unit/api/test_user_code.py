"""`spec.extensions` in a worker process: imported and registered, or a bad input that names the module and its error."""

import pytest

from rl_core.workers.host import Ended, _register_extensions


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    """A module of the user with the given text; its name."""
    name = f"user_extension_{abs(hash(request.node.name))}"
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def test_a_module_is_imported_and_its_register_called_where_it_has_one(module):
    name = module("done = []\ndef register(): done.append(1)")
    _register_extensions([name, "json"])
    assert __import__(name).done == [1]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("raise ValueError('no licence')", "ValueError: no licence"),
        ("def register(): raise KeyError('x')", "KeyError: 'x'"),
        ("def register(:", "SyntaxError"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
    ],
    ids=["raises", "register raises", "syntax", "exits", "dependency"],
)
def test_one_that_fails_in_any_way_is_bad_input(module, text, told):
    name = module(text)
    with pytest.raises(Ended, match=f"extensions: must be importable, got '{name}': {told}") as caught:
        _register_extensions([name])
    assert caught.value.code == 2
