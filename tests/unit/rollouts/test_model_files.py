"""What a rollout reads from the files of a model folder, and which are refused with the file, what is wrong and the way out."""

import pytest

from rl_core.api.errors import ConfigError
from rl_core.rollouts.model_files import generation_eos_ids, read_config


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, ()),
        ({"generation_config.json": b"{}"}, ()),
        ({"generation_config.json": b'{"eos_token_id": null}'}, ()),
        ({"generation_config.json": b'{"eos_token_id": 7}'}, (7,)),
        ({"generation_config.json": b'{"eos_token_id": [7, 8]}'}, (7, 8)),
    ],
    ids=["no file", "none named", "null", "one", "several"],
)
def test_end_of_sequence_ids_are_those_of_the_generation_config(files, ids):
    assert generation_eos_ids(files) == ids


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (b'{"eos_token_id": [7', "must be JSON"),
        (b"\xff\xfe", "must be JSON"),
        (b"[7]", "must hold an object, got list"),
        (b'{"eos_token_id": "</s>"}', "eos_token_id must be a token id, a list of them or null, got '</s>'"),
        (b'{"eos_token_id": {"id": 7}}', "eos_token_id must be a token id, a list of them or null"),
    ],
    ids=["cut off", "no text", "a list", "a token's text", "a map"],
)
def test_a_generation_config_that_cannot_be_read_is_refused_instead_of_ending_nothing(content, wrong):
    with pytest.raises(ConfigError) as error:
        generation_eos_ids({"generation_config.json": content})
    assert str(error.value).startswith("generation_config.json") and wrong in str(error.value)
    assert "mend" in str(error.value)


@pytest.mark.parametrize(
    "files", [{}, {"config.json": b"{"}, {"config.json": b"3"}], ids=["none", "cut off", "a number"]
)
def test_a_model_without_a_readable_config_is_refused(files):
    with pytest.raises(ConfigError, match=r"config\.json.*folder"):
        read_config(files)
