"""The real SGLang engine behind the rollout worker: what it generates and scores, which weights it holds.

One engine for all files of the folder: its start takes half a minute of processor time. Truth is transformers, our own engine, and checksums taken of the engine's own tensors.
"""

import asyncio
import concurrent.futures
import json
import resource
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import torch

from rl_core.api.errors import GenerationUnavailable, InfrastructureError, RolloutDataFailure
from rl_core.data.tokenizer import Tokenizer
from rl_core.rollouts.engine import PROVEN
from rl_core.rollouts.hf.config import DecoderConfig
from rl_core.rollouts.hf.engine import HFEngine
from rl_core.rollouts.hf.weights import DecoderWeights
from rl_core.rollouts.rows import Row
from rl_core.rollouts.sampling import SamplingParams
from tests.integration.rollout_world import (
    CONFIG,
    flip_in_memory,
    random_state,
    records,
    trainer_logprobs,
    transformers_model,
    wait_for,
)

MAX_SEQ_LEN = 64
PROMPTS = [[3, 4, 5], [7, 8], list(range(2, 40)), [9, 10, 11, 12]]


@pytest.fixture
def world(sglang_world):
    return sglang_world


@pytest.fixture
def published(world):
    """Publish random weights as the next version; return the version and the model that transformers makes of them."""

    def publish():
        state = random_state(world.version + 1)
        world.publish_next(state)
        return world.version, transformers_model(state)

    return publish


def ask(world, prompts, greedy=False, **params):
    """Return the ids, log-probabilities and whole outputs of rows that are requested together."""
    generator = world.engine.generator(SamplingParams(**{"max_new_tokens": 20, **params}))

    async def rows():
        return await asyncio.gather(*[generator.generate_row(p, seed=i, greedy=greedy) for i, p in enumerate(prompts)])

    outputs = asyncio.run(rows())
    return [output.ids for output in outputs], [torch.tensor(output.logprobs) for output in outputs], outputs


def hf_engine(world, version):
    weights = DecoderWeights(DecoderConfig.from_dict(CONFIG))
    weights.load(random_state(version).items())
    return HFEngine(weights, Tokenizer.from_files(world.worker.files), max_batch=8, max_seq_len=MAX_SEQ_LEN)


def test_greedy_tokens_are_those_of_our_engine_and_of_transformers(world, published):
    version, model = published()
    new, _, out = ask(world, PROMPTS, greedy=True)
    ours = hf_engine(world, version).generate(PROMPTS, SamplingParams(max_new_tokens=20, temperature=0.0))
    assert new == [one.ids for one in ours]
    assert [output.finish_reason for output in out] == [output.finish_reason for output in ours]
    for prompt, ids in zip(PROMPTS, new):
        made = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert ids == made[0, len(prompt) :].tolist()
    assert [output.versions for output in out] == [[(0, len(ids), version)] for ids in new]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_the_trainers_at_any_temperature(world, published, temperature):
    _, model = published()
    new, logprobs, _ = ask(world, PROMPTS * 4, temperature=temperature)
    assert len({tuple(ids) for ids in new}) > len(PROMPTS), "the samples of one prompt differ"
    for prompt, ids, found in zip(PROMPTS * 4, new, logprobs):
        wanted = trainer_logprobs(model, prompt, ids, temperature)
        assert (found - wanted).abs().max() < 1e-4


def test_biased_tokens_and_their_log_probabilities_are_those_of_our_engine(world, published):
    version, model = published()
    settings = {"max_new_tokens": 20, "ignore_eos": True, "logit_bias": ((5, -100.0), (6, 2.5))}
    params = SamplingParams(**settings, temperature=0.0)
    rows = [Row(key=index, prompt=prompt, params=params, seed=1) for index, prompt in enumerate(PROMPTS)]
    greedy = [future.result(60) for future in submit(world, *rows).values()]
    assert [row.ids for row in greedy] == [row.ids for row in hf_engine(world, version).generate(PROMPTS, params)]
    new, logprobs, _ = ask(world, PROMPTS, temperature=0.7, **settings)
    for prompt, ids, found in zip(PROMPTS, new, logprobs):
        assert 5 not in ids
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float()
        logits[:, 5] -= 100
        logits[:, 6] += 2.5
        wanted = (logits / 0.7).log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
        assert (found - wanted).abs().max() < 1e-4


def test_min_p_excludes_the_same_tokens_and_leaves_the_log_probabilities(world, published):
    _, model = published()
    new, logprobs, _ = ask(world, PROMPTS * 8, min_p=0.3, ignore_eos=True)
    least = 1.0
    for prompt, ids, found in zip(PROMPTS * 8, new, logprobs):
        with torch.no_grad():
            exact = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        assert (found - exact[torch.arange(len(ids)), torch.tensor(ids)]).abs().max() < 1e-4
        least = min(least, (found - exact.max(-1).values).exp().min().item())
    assert 0.299 < least < 0.5


def test_stops_and_limits_end_a_row_where_our_engine_ends_it(world, published):
    version, _ = published()
    free, _, _ = ask(world, PROMPTS[:1], greedy=True)
    tokenizer, ours = Tokenizer.from_files(world.worker.files), hf_engine(world, version)
    text = tokenizer.decode(free[0], skip_special_tokens=False)
    for changes in (
        {"stop_token_ids": (free[0][4],)},
        {"stop_strings": (text[2:4],)},
        {"stop_strings": ("no such text", text[5])},
        {"max_new_tokens": 60},
        {"max_new_tokens": 0},
    ):
        new, _, out = ask(world, PROMPTS, greedy=True, **changes)
        wanted = ours.generate(PROMPTS, SamplingParams(temperature=0.0, **{"max_new_tokens": 20, **changes}))
        assert new == [one.ids for one in wanted], changes
        assert [output.finish_reason for output in out] == [output.finish_reason for output in wanted], changes


def test_a_bit_that_changes_while_the_engine_loads_is_found_and_the_version_is_not_served(
    world, published, monkeypatch
):
    for _ in range(10):
        version, _ = published()
        assert (world.worker.status()["version"], world.worker.status()["weights_proof"]) == (version, PROVEN)
    target, state = world.engine.weight_target, random_state(77)
    changed = "model.layers.1.mlp.down_proj.weight"
    call = target._call

    def disturbed(method, **arguments):
        if method == "end_weights":
            assert flip_in_memory(world.engine.engine.pids[1], state[changed].numpy().tobytes()) > 0
        return call(method, **arguments)

    monkeypatch.setattr(target, "_call", disturbed)
    with pytest.raises(InfrastructureError, match=rf"1 hold something else \['{changed}'\]"):
        target.load(iter(state.items()), 77)
    monkeypatch.undo()
    published()


def test_a_tensor_that_does_not_reach_the_engine_is_seen_and_the_version_is_not_served(world, published):
    published()
    target = world.engine.weight_target
    state = random_state(77)
    left_out = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(Exception, match=left_out):
        target.load(((name, tensor) for name, tensor in state.items() if name != left_out), 77)
    _, model = published()  # an update after one that failed is whole
    new, logprobs, _ = ask(world, PROMPTS[:1])
    assert (logprobs[0] - trainer_logprobs(model, PROMPTS[0], new[0], 1.0)).abs().max() < 1e-4


def test_groups_of_the_ledger_become_records_that_say_what_was_repeatable(world, published):
    version, _ = published()
    world.put(*range(6), version=version)
    for record in records(world, 6):
        assert record.start_version == record.end_version == version and len(record.completions) == 4
        assert {completion.seed for completion in record.completions} == {None}
        assert {completion.policy_versions for completion in record.completions} == {(version, version)}
    world.put(7, mode="validate", version=version)
    assert len(world.validation.get(timeout=120).rewards) == 1
    load = world.engine.load() if hasattr(world, "engine") else world.worker._parts.engine.load()
    assert load.prompt_tokens > 0 and load.running == load.waiting == 0
    answer = world.on_loop(world.worker.probe([3, 4, 5], 4))
    assert answer.version == version and 1 <= len(answer.ids) == len(answer.logprobs) <= 4


def test_a_row_that_the_engine_refuses_fails_alone_and_as_its_own_fault(world, published):
    published()
    many = [f"stop {index}" for index in range(40)]
    futures = submit(world, Row(key="good", prompt=[3, 4], params=SamplingParams(max_new_tokens=5), seed=1))
    futures |= submit(world, Row(key="stops", prompt=[3, 4], params=SamplingParams(stop_strings=tuple(many)), seed=1))
    futures |= submit(world, Row(key="ids", prompt=[3, 43], params=SamplingParams(), seed=1))
    assert isinstance(futures["stops"].exception(60), RolloutDataFailure)
    assert "token ids must be in [0, 43)" in str(futures["ids"].exception(60))
    assert len(futures["good"].result(60).ids) >= 1


def test_rows_that_wait_and_the_use_of_the_memory_are_told_while_it_generates(world, published):
    published()
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    futures = submit(world, *[Row(key=index, prompt=[3, 4], params=params, seed=1) for index in range(80)])
    while not all(future.done() for future in futures.values()):
        told = world.engine.engine.call("alive").result(60)
        if told["waiting"] and told["kv_use"]:
            break
    assert 0 < told["waiting"] <= 80 and 0 < told["kv_use"] <= 1
    assert [len(future.result(120).ids) for future in futures.values()] == [60] * 80


def submit(world, *rows):
    """Give rows to the engine; return a future of each by key."""
    futures = {row.key: concurrent.futures.Future() for row in rows}

    def sink(results):
        for key, result in results:
            if isinstance(result, BaseException):
                futures[key].set_exception(result)
            else:
                futures[key].set_result(result)

    world.engine.engine.submit(rows, sink)
    return futures


def test_a_row_that_is_aborted_before_it_reaches_the_scheduler_does_not_run(world, published):
    published()
    engine = world.engine.engine
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)

    def tokens():
        return engine.call("alive").result(60)["tokens"]

    before = tokens()
    submit(world, Row(key="sent with its abort", prompt=[3, 4, 5], params=params, seed=1))
    engine.abort(["sent with its abort"])
    world.on_loop(engine.pause("in_place", 60))
    submit(world, Row(key="held back", prompt=[3, 4, 5], params=params, seed=1))
    tokens()  # the child has the row
    engine.abort(["held back"])
    world.on_loop(engine.resume(60))
    short = Row(key="short", prompt=[3, 4, 5], params=SamplingParams(max_new_tokens=40, ignore_eos=True), seed=1)
    submit(world, short)["short"].result(60)
    assert tokens() - before <= 40 + 5, "a row that was dispatched may have some tokens before its abort arrives"


def test_every_rank_of_an_engine_receives_the_weights():
    child = [sys.executable, "-m", "tests.integration.sglang_ranks_child"]
    done = subprocess.run(child, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[1, 2, 3, 4]] * 2


AWAKE = ["weights", "kv_cache"]
TURNS = count(10_000)
"""Tokens of the device lease; the engine is shared with other files, which use lower ones."""


def test_an_engine_that_gave_its_device_away_keeps_its_rows_and_goes_on_with_the_weights_that_it_has_then(
    world, published
):
    published()
    params = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    alone = submit(world, Row(key="alone", prompt=PROMPTS[0], params=params, seed=1))["alone"].result(60)
    running = submit(world, Row(key="runs", prompt=PROMPTS[0], params=params, seed=1))
    world.on_loop(world.worker.occupy([], next(TURNS)))
    waiting = submit(world, Row(key="waits", prompt=PROMPTS[0], params=params, seed=1))
    with pytest.raises(GenerationUnavailable, match="given up its device"):
        world.on_loop(world.worker.probe([3, 4, 5], 2))
    world.on_loop(world.worker.occupy(AWAKE, next(TURNS)))
    assert running["runs"].result(60).ids == waiting["waits"].result(60).ids == alone.ids
    world.on_loop(world.worker.occupy([], next(TURNS)))
    world.on_loop(world.worker.occupy(["weights"], next(TURNS)))
    late = submit(world, Row(key="late", prompt=PROMPTS[0], params=params, seed=1))
    version, _ = published()  # it comes before the cache has its place
    assert not late["late"].done()
    world.on_loop(world.worker.occupy(AWAKE, next(TURNS)))
    output = late["late"].result(60)
    wanted = hf_engine(world, version).generate([PROMPTS[0]], params)[0]
    assert (output.ids, output.versions) == (wanted.ids, [(0, 20, version)])


def test_weights_that_changed_while_the_engine_had_given_its_device_away_are_not_served(world, published):
    version, _ = published()
    world.on_loop(world.worker.occupy([], next(TURNS)))
    held = random_state(version)["model.layers.1.mlp.down_proj.weight"].numpy().tobytes()
    assert flip_in_memory(world.engine.engine.pids[1], held) > 0
    with pytest.raises(InfrastructureError, match="weights must be those of before"):
        world.on_loop(world.worker.occupy(AWAKE, next(TURNS)))
    with pytest.raises(GenerationUnavailable, match="given up its device"):
        world.on_loop(world.worker.probe([3, 4, 5], 2))
    published()
    world.on_loop(world.worker.occupy(AWAKE, next(TURNS)))
    assert len(ask(world, PROMPTS[:1])[0][0]) >= 1


@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_an_interrupted_row_goes_on_with_its_tokens_log_probabilities_and_versions(world, published, mode):
    for _ in range(5):  # the interruption may come after the row's own end
        old, before = published()
        params = SamplingParams(max_new_tokens=60, ignore_eos=True)
        reported = []
        long = Row(key="long", prompt=[3, 4, 5], params=params, seed=1, on_tokens=reported.append)
        short = Row(key="short", prompt=[3, 4, 5], params=SamplingParams(max_new_tokens=4, ignore_eos=True), seed=1)
        futures = submit(world, long, short)
        futures["short"].result(60)
        world.on_loop(world.worker.pause_generation(mode))
        version, after = old + 1000, transformers_model(random_state(500))
        target = world.engine.weight_target
        target.load(iter(random_state(500).items()), version)
        asyncio.run(target.resume(version, ""))
        world.on_loop(world.worker.continue_generation())
        output = futures["long"].result(60)
        if len(output.versions) == 2:
            break
    (start, middle, first), (again, end, second) = output.versions
    assert (start, end, first, second) == (0, 60, old, version) and middle == again
    # Its tokens were reported while it ran, over the interruption, up to those of the last step.
    streamed = [token for ids in reported for token in ids]
    assert len(reported) > 5 and len(streamed) >= 50 and streamed == output.ids[: len(streamed)]
    wanted = trainer_logprobs(before, [3, 4, 5], output.ids, 1.0)[:middle]
    assert (torch.tensor(output.logprobs[:middle]) - wanted).abs().max() < 1e-4
    wanted = trainer_logprobs(after, [3, 4, 5], output.ids, 1.0)[middle:]
    assert (torch.tensor(output.logprobs[middle:]) - wanted).abs().max() < 1e-4


def test_an_engine_that_gets_no_memory_is_lost_with_that_reason_and_another_one_generates(world, published):
    """Its scheduler may take no more than it has, as in a pod at its limit, and is given batches until it needs more."""
    version, model = published()
    world.on_loop(world.worker.join(world.publisher.address))
    hold, given, calls = concurrent.futures.Future(), len(world.ledger.given_back), len(world.env.calls)
    lost = world.worker.status()["engines_lost"]
    world.env.hold = hold
    world.put(30, 31, version=version)
    wait_for(lambda: sum(world.env.calls[calls:]) == 8)  # their rows are scored when the engine is lost
    pids = world.engine.engine.pids
    used = next(line for line in Path(f"/proc/{pids[1]}/status").read_text().splitlines() if line.startswith("VmSize:"))
    resource.prlimit(pids[1], resource.RLIMIT_AS, (int(used.split()[1]) * 1024,) * 2)
    errors = []
    while not errors:
        prompts = torch.randint(2, 43, (128, 60)).tolist()
        params = SamplingParams(max_new_tokens=4, ignore_eos=True)
        rows = [Row(key=index, prompt=prompt, params=params, seed=1) for index, prompt in enumerate(prompts)]
        futures = submit(world, *rows)
        errors = [error for future in futures.values() if (error := future.exception(120)) is not None]
    for error in errors:
        assert isinstance(error, GenerationUnavailable) and "the engine is lost" in str(error)
        assert any(word in str(error) for word in ("can't allocate memory", "MemoryError", "bad_alloc")), error
    assert world.worker.status()["engines_lost"] == lost + 1
    wait_for(lambda: len(world.ledger.given_back) == given + 2)
    world.env.hold = None
    hold.set_result(None)
    wait_for(lambda: world.worker.status()["version"] == version, seconds=world.spec.runtime.deadlines.wait_ready)
    assert not {*pids} & {*world.engine.engine.pids} and world.worker.status()["weights_proof"] == PROVEN
    world.put(30, 31, version=version, again="-again")
    for record in records(world, 2):
        assert record.lease_token.endswith("-again"), "of the engine that was lost nothing was delivered"
        for completion in record.completions:
            asked, answer = (message["token_ids"].tolist() for message in completion.message_log[:2])
            wanted = trainer_logprobs(model, asked, answer)
            assert (completion.message_log[1]["generation_logprobs"] - wanted).abs().max() < 1e-4
