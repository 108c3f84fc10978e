"""YAML numbers are what kubectl takes them for."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rl_core.api.text import load_documents, load_value


@pytest.mark.parametrize("text", ["1e-4", "3E5", "-2e+3", "1.e-4", "1.5e-4", "+1e2"])
def test_scientific_notation_is_a_number(text):
    assert load_value(text) == float(text)


@pytest.mark.parametrize("text", ["e4", "1e", "0x1e4f", "v1e-4", "1e-4s", "'1e-4'", "1_e4"])
def test_what_only_resembles_it_is_what_it_was(text):
    assert load_value(text) == yaml.safe_load(text)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_number_that_json_writes_comes_back(number):
    assert load_value(json.dumps(number)) == number


def test_empty_documents_are_left_out():
    assert load_documents("---\na: 1e-3\n---\n---\nb: 2\n") == [{"a": 1e-3}, {"b": 2}]
