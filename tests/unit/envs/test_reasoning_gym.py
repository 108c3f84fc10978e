"""`reasoning_gym`: problems are reproducible, and what scoring needs survives the way through the processes."""

import contextlib
import io

import pytest

from rl_core.api.errors import ConfigError, RolloutDataFailure
from rl_core.data.reasoning_gym import make_entries, plain, task_names
from rl_core.envs.reasoning_gym import ReasoningGymEnvironment
from rl_core.transports import frames

TASKS_WITH_MANY_ANSWERS = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Their entries name no answer."""
MIXTURES = {"composite"}
"""Needs a list of other tasks."""


def log(completion):
    return [{"role": "user", "content": "question"}, {"role": "assistant", "content": completion}]


def reward(env, completion, metadata):
    return float(env.step([log(completion)], [metadata]).rewards[0])


@pytest.fixture(scope="module")
def env():
    return ReasoningGymEnvironment({})


def test_the_own_answer_of_every_task_scores_1_after_the_wire(env):
    for task in task_names():
        if task in MIXTURES | TASKS_WITH_MANY_ANSWERS:
            continue
        with contextlib.redirect_stdout(io.StringIO()):  # some tasks print while they generate
            entry = make_entries(task, 1, 3, {})[0]
        travelled = frames.decode(frames.encode(entry))
        with contextlib.redirect_stdout(io.StringIO()):
            assert reward(env, travelled["answer"], travelled["metadata"]) == 1.0, task


def test_equal_arguments_give_equal_problems_and_seeds_differ():
    one = make_entries("chain_sum", 5, 1, {"min_terms": 2, "max_terms": 2})
    assert one == make_entries("chain_sum", 5, 1, {"min_terms": 2, "max_terms": 2})
    assert [e["question"] for e in one] != [e["question"] for e in make_entries("chain_sum", 5, 2, {})]


def test_a_wrong_answer_scores_less_and_silence_scores_0(env):
    entry = make_entries("chain_sum", 1, 1, {})[0]
    assert reward(env, "surely not", entry["metadata"]) < 1.0
    assert reward(env, "", entry["metadata"]) == 0.0


@pytest.mark.parametrize(
    ("task", "text"), [("prime_factorization", "no idea"), ("boxnet", "42"), ("game_of_life", "{}")]
)
def test_text_that_a_scorer_cannot_read_is_a_wrong_answer(env, task, text):
    entry = make_entries(task, 1, 1, {})[0]
    assert reward(env, text, entry["metadata"]) == 0.0


@pytest.mark.parametrize("task", ["countdown", "n_queens", "polynomial_multiplication"])
def test_an_answer_that_takes_for_ever_to_compute_counts_as_missing(task):
    env = ReasoningGymEnvironment({"cpuSeconds": 0.2})
    entry = make_entries(task, 1, 1, {})[0]
    assert reward(env, "9**9**9**9", entry["metadata"]) < 0.1


def test_an_entry_that_cannot_be_scored_is_a_data_failure(env):
    damaged = {"task": "chain_sum", "entry": {"question": "?"}}
    with pytest.raises(RolloutDataFailure, match="row 0: the scorer of chain_sum failed on '2': KeyError"):
        reward(env, "2", damaged)


def test_metadata_is_found_as_a_column_of_a_data_row(env):
    entry = make_entries("chain_sum", 1, 1, {})[0]
    row = {"answer": entry["answer"], "ground_truth": entry["answer"], "metadata": entry["metadata"]}
    assert reward(env, entry["answer"], row) == 1.0


def test_one_environment_scores_several_tasks_in_one_batch(env):
    entries = [make_entries(task, 1, 5, {})[0] for task in ("chain_sum", "spell_backward", "gcd")]
    returned = env.step([log(e["answer"]) for e in entries], [e["metadata"] for e in entries])
    assert [float(r) for r in returned.rewards] == [1.0, 1.0, 1.0]


def test_the_tag_cuts_the_answer_out_of_the_completion():
    env = ReasoningGymEnvironment({"answerTag": "answer", "minScore": 0.5})
    entry = make_entries("chain_sum", 1, 1, {})[0]
    right = f"<answer>12345</answer> no: <answer> {entry['answer']} </answer>"
    assert reward(env, right, entry["metadata"]) == 1.0
    assert reward(env, entry["answer"], entry["metadata"]) == 0.0


def test_partial_credit_is_kept_unless_a_least_score_is_set(env):
    entry = make_entries("chain_sum", 1, 1, {})[0]
    text = f"it is {entry['answer']}"
    partial = reward(env, text, entry["metadata"])
    assert 0.0 < partial < 1.0
    assert reward(ReasoningGymEnvironment({"minScore": 1.0}), text, entry["metadata"]) == 0.0


def test_metadata_without_an_entry_is_a_data_failure(env):
    with pytest.raises(RolloutDataFailure, match=r"row 0: metadata must hold task and entry, got keys \['answer'\]"):
        reward(env, "1", {"answer": "1"})


def test_an_unknown_task_and_a_refused_field_are_config_errors():
    with pytest.raises(ConfigError, match="got 'chain_sums'; known are .*chain_sum"):
        make_entries("chain_sums", 1, 1, {})
    with pytest.raises(ConfigError, match="chain_sum refuses .*its fields are .*max_digits"):
        make_entries("chain_sum", 1, 1, {"digits": 2})
    with pytest.raises(ConfigError, match="chain_sum refuses"):
        make_entries("chain_sum", 1, 1, {"min_terms": 5, "max_terms": 2})


def test_plain_keeps_tuples_and_turns_numpy_into_python():
    np = pytest.importorskip("numpy")
    value = plain({"a": (np.float64(1.5), np.str_("x")), "b": [np.int64(3)], 4: np.bool_(True), "c": np.arange(2)})
    assert value == {"a": (1.5, "x"), "b": [3], 4: True, "c": [0, 1]}
    kinds = [type(v) for v in (*value["a"], *value["b"], value[4])]
    assert kinds == [float, str, int, bool]
