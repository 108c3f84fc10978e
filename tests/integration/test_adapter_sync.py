"""Adapter-only sync by a real publisher, receiver and engines: what is sent, what is served, and the ways to serve a wrong adapter.

The HF engine merges adapters into its weights; SGLang runs them beside its weights, in a process of its own.
"""

import concurrent.futures
import os
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_core.api.errors import DeadlineExceeded, GenerationUnavailable, InfrastructureError, WeightsDiverged
from rl_core.api.lora import LoraSpec
from rl_core.messages.weights import ReceiverAddress
from rl_core.rollouts.adapters import AdapterMerge
from rl_core.rollouts.hf.worker import HFRolloutWorker
from rl_core.rollouts.rows import Row
from rl_core.rollouts.sampling import SamplingParams
from rl_core.rollouts.sglang import SGLangWorker
from rl_core.transports import tokens
from rl_core.weights.adapters import AdapterSource
from tests.integration.conftest import ARGUMENTS
from tests.integration.rollout_world import (
    World,
    content_check,
    put_behind_the_proof,
    random_state,
    trainer_logprobs,
    transformers_model,
    wait_for,
)
from tests.weight_samples import StateSource

LORA = {"rank": 2, "alpha": 6.0}
SCALE = 3.0
PROMPT = list(range(2, 20))
DOWN = "model.layers.1.mlp.down_proj.lora_B.weight"
VALUE = "model.layers.0.self_attn.v_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
VERIFY_EVERY = 3
"""Versions in which each tensor of the base is read once."""
NAMES = ("rollout:0", "rollout:1")


def adapters_of(state, seed, rank=2):
    """Return adapters of rank `rank` for all linear layers of `state`."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: (tuple(tensor.shape), "float32") for name, tensor in state.items()}
    zeros = AdapterMerge(LoraSpec(rank=rank, alpha=3.0 * rank), shapes).adapters
    return {name: torch.randn(tensor.shape, generator=generator) * 0.2 for name, tensor in zeros.items()}


def merged(world):
    """Return the model of base plus adapters that `world` published last, by transformers."""
    state = dict(world.state)
    for name in world.adapters:
        if name.endswith("lora_B.weight"):
            layer = name.removesuffix(".lora_B.weight")
            up, down = world.adapters[name], world.adapters[f"{layer}.lora_A.weight"]
            state[f"{layer}.weight"] = state[f"{layer}.weight"] + SCALE * up @ down
    return transformers_model(state)


class LoraWorld(World):
    """A worker of a job with adapters, and the trainer's side of it."""

    def __init__(self, worker, **rollout):
        spec = {"model": {"path": "unused", "lora": LORA}, "weights": {"verifyEvery": VERIFY_EVERY}}
        super().__init__(worker, max_seq_len=64, spec=spec, **rollout)
        self.state = random_state(1)

    def sync(self, seed, *, base=None, receivers=None, adapters=None):
        """Publish adapters of `seed` as the next version, with the base where the publisher needs it or one is given.

        `receivers`: the engine of this world if None. One of them must acknowledge where there are any.
        """
        self.state = base or self.state
        self.adapters = adapters or adapters_of(self.state, seed)
        self.version += 1
        if self.publisher.needs_base or base is not None:
            source = StateSource({**self.state, **self.adapters})
        else:
            source = AdapterSource(self.adapters, bucket_bytes=1 << 20)
        own = ReceiverAddress(name="rollout:0", address=self.server.address, host_token=tokens.host_token())
        receivers = [own] if receivers is None else receivers
        report = self.publisher.publish(self.version, source, receivers, min(1, len(receivers)))
        self.ledger.served = self.version
        return report

    def difference(self):
        """Return the largest difference of a log-probability between the engine and base plus adapters in transformers."""
        answer = self.on_loop(self.worker.probe(PROMPT, 8))
        expected = trainer_logprobs(merged(self), PROMPT, answer.ids)
        return float((torch.tensor(answer.logprobs) - expected).abs().max())

    def served(self):
        return self.worker.status()["version"]


SGLANG = {"engine": "sglang", "maxBatch": 64, "engineArgs": ARGUMENTS}


@pytest.fixture(scope="module")
def hf_world():
    made = LoraWorld(HFRolloutWorker)
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def sglang_adapters():
    """A world whose engine takes adapters, unlike that of the fixture `sglang_world`."""
    made = LoraWorld(SGLangWorker, **SGLANG)
    made.start()
    yield made
    made.close()


@pytest.fixture(params=["hf", "sglang"])
def synced(request):
    """The world of either engine with a version that is served."""
    return start_from(request.getfixturevalue({"hf": "hf_world", "sglang": "sglang_adapters"}[request.param]))


@pytest.fixture
def synced_sglang(sglang_adapters):
    """The world of SGLang, which runs in processes of its own, with a version that is served."""
    return start_from(sglang_adapters)


@pytest.fixture
def both(hf_world, sglang_adapters):
    """The worlds of both engines, which the publisher of the first serves as rollout:0 (SGLang) and rollout:1 (HF)."""
    worlds = [sglang_adapters, hf_world]
    for world in worlds:
        world.on_loop(_forget(world))
    worlds[0].version = max(world.version for world in worlds)
    publish_to(worlds, 50, base=random_state(1))
    return worlds


def start_from(world):
    world.on_loop(_forget(world))
    world.sync(100 + world.version, base=random_state(1))
    return world


def publish_to(worlds, seed, **changes):
    """Have the publisher of the first of `worlds` publish adapters of `seed` to all of them; return the report."""
    names = range(len(worlds))
    receivers = [
        ReceiverAddress(name=f"rollout:{i}", address=worlds[i].server.address, host_token=tokens.host_token())
        for i in names
    ]
    report = worlds[0].sync(seed, receivers=receivers, **changes)
    for world in worlds[1:]:
        world.version, world.state, world.adapters = worlds[0].version, worlds[0].state, worlds[0].adapters
    return report


async def _forget(world):
    world.worker._built().receiver.forget()


def patched(world, monkeypatch, change):
    """Let `change` have the copy of the next version before it is offered."""
    write = world.publisher._adapter_encoder.write
    monkeypatch.setattr(world.publisher._adapter_encoder, "write", lambda *a, **k: change(write(*a, **k)))


def test_after_the_first_version_only_adapters_are_sent_and_the_engine_serves_base_plus_adapter(synced):
    for seed in (2, 3):
        report = synced.sync(seed)
        adapter_bytes = sum(tensor.nbytes for tensor in synced.adapters.values())
        assert report.patched == ("rollout:0",) and adapter_bytes <= report.bytes <= adapter_bytes + 8 * 28
        assert synced.served() == synced.version and synced.difference() < 1e-4


def test_another_base_is_sent_whole(synced):
    report = synced.sync(4, base=random_state(7))
    assert not report.patched and synced.difference() < 1e-4
    assert synced.sync(5).patched and synced.difference() < 1e-4


def cut(copy):
    return replace(copy, patch=replace(copy.patch, nbytes=copy.patch.nbytes // 2))


def doubled(copy):
    copy.patch.memory.data.view(np.float32)[: copy.patch.nbytes // 4] *= 2
    return copy


def twice(copy):
    return replace(copy, patch=replace(copy.patch, tensors=(*copy.patch.tensors, copy.patch.tensors[0])))


def missing(copy):
    return replace(copy, patch=replace(copy.patch, tensors=copy.patch.tensors[1:]))


def of_another_base(copy):
    return replace(copy, patch=replace(copy.patch, base="0" * 32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, "must lie inside"),
        (doubled, "do not have the checksum of the manifest, first"),
        (twice, "must change a tensor once"),
        (missing, "must come as a whole"),
        (of_another_base, f"are offered over base {'0' * 32}, got base "),
    ],
    ids=["truncated", "doubled values", "a tensor twice", "a tensor missing", "of another base"],
)
def test_a_wrong_adapter_is_named_and_the_whole_version_follows_in_the_same_sync(
    synced, monkeypatch, caplog, change, message
):
    with monkeypatch.context() as patch:
        patched(synced, patch, change)
        report = synced.sync(6)
    assert not report.patched and message in caplog.text
    assert synced.served() == synced.version and synced.difference() < 1e-4


def test_an_adapter_that_is_wrong_in_host_memory_too_is_not_served(synced, monkeypatch):
    def broken(copy):
        starts = {copy.manifest.entries[index].name: start for index, start in copy.layout.starts.items()}
        copy.memory.data[starts[DOWN]] ^= 1
        return replace(copy, patch=None)

    with monkeypatch.context() as patch, pytest.raises(DeadlineExceeded, match=rf"FAILED.*{DOWN}|{DOWN}"):
        patched(synced, patch, broken)
        synced.sync(7)
    assert synced.served() == -1
    synced.sync(8)
    assert synced.difference() < 1e-4


def test_an_adapter_of_another_rank_is_refused_by_name(synced):
    before = synced.served()
    with pytest.raises(DeadlineExceeded, match=r"lora_A\.weight must be float32 \[2, 32\], got float32 \[3, 32\]"):
        synced.sync(9, base=random_state(1), adapters=adapters_of(random_state(1), 9, rank=3))
    assert synced.served() == before
    with pytest.raises(ValueError, match="adapters must be the 28 of the first version"):
        synced.sync(10)


def test_adapters_over_another_base_than_they_say_are_not_served(synced, monkeypatch):
    def of_a_base_that_nobody_sent(copy):
        first, *others = copy.manifest.entries
        return replace(copy, manifest=replace(copy.manifest, entries=(replace(first, checksum=(1, 2)), *others)))

    with monkeypatch.context() as patch, pytest.raises(DeadlineExceeded, match=r"model\.embed_tokens\.weight"):
        patched(synced, patch, of_a_base_that_nobody_sent)
        synced.sync(14)
    assert synced.served() == -1
    with pytest.raises(GenerationUnavailable, match="no proven weights are served"):
        synced.on_loop(synced.worker.probe(PROMPT, 4))
    assert not synced.sync(15).patched and synced.difference() < 1e-4


def test_an_adapter_that_is_given_to_the_engine_twice_is_added_once(synced, monkeypatch):
    target = synced.engine.weight_target
    load = target.load

    def twice(tensors, version):
        given = [(name, tensor.clone()) for name, tensor in tensors]
        load(iter(given), version)
        load(iter(given), version)

    with monkeypatch.context() as patch:
        patch.setattr(target, "load", twice)
        assert synced.sync(16).patched
    assert synced.difference() < 1e-4


def test_adapters_that_one_of_two_engines_did_not_get_are_generated_with_by_the_other_alone(both):
    sglang, hf = both
    assert publish_to(both, 51).patched == ("rollout:0", "rollout:1")
    assert content_check(dict(zip(NAMES, both, strict=True)), merged(hf), PROMPT) == 2
    assert publish_to(both[:1], 52).acked == ("rollout:0",)
    assert (sglang.served(), hf.served()) == (sglang.version, sglang.version - 1)
    wait_for(lambda: hf.ledger.polls)
    hf.ledger.polls.pop()[0].reply([hf.lease(1, version=sglang.version)])
    wait_for(lambda: hf.ledger.given_back)
    assert hf.ledger.given_back[-1][1:] == ("stale", "its weights are not those that are served")
    assert publish_to(both, 53).patched == ("rollout:0", "rollout:1")
    assert max(world.difference() for world in both) < 1e-4


@pytest.mark.parametrize("lost", [0, 1], ids=["sglang", "hf"])
def test_an_engine_whose_adapters_are_lost_on_their_way_is_named_and_generates_nothing(both, lost, monkeypatch):
    def nothing(tensors, version):
        raise InfrastructureError("the adapters did not arrive")

    with monkeypatch.context() as patch:
        patch.setattr(both[lost].engine.weight_target, "load", nothing)
        report = publish_to(both, 54)
    assert report.acked == (NAMES[1 - lost],) and report.failed.keys() == {NAMES[lost]}
    assert "the adapters did not arrive" in report.failed[NAMES[lost]]
    assert both[lost].served() == -1 and both[1 - lost].difference() < 1e-4
    with pytest.raises(GenerationUnavailable, match="no proven weights are served"):
        both[lost].on_loop(both[lost].worker.probe(PROMPT, 4))
    report = publish_to(both, 55)
    assert report.patched == (NAMES[1 - lost],) and max(world.difference() for world in both) < 1e-4


def test_an_engine_with_another_base_than_the_others_gets_the_base_in_the_same_sync(both, caplog):
    sglang, hf = both
    hf.sync(56, base=random_state(7))
    sglang.version = hf.version
    expected, got = (world.worker._built().receiver._states.base for world in both)
    report = publish_to(both, 57)
    assert (report.acked, report.patched) == (NAMES, NAMES[:1])
    assert f"of version {sglang.version} are offered over base {expected}, got base {got} in memory" in caplog.text
    assert expected != got and caplog.text.count("are offered over base") == 1
    assert max(world.difference() for world in both) < 1e-4


@pytest.mark.parametrize("wrong", [0, 1], ids=["sglang", "hf"])
def test_a_base_that_was_changed_behind_the_proof_is_named_in_its_turn_and_replaced(both, wrong, caplog):
    put_behind_the_proof(both[wrong], VALUE, random_state(7)[VALUE])
    reports = [publish_to(both, 58 + step) for step in range(VERIFY_EVERY)]
    assert [report.acked for report in reports] == [NAMES] * VERIFY_EVERY
    assert sorted(report.patched == NAMES for report in reports) == [False] + [True] * (VERIFY_EVERY - 1)
    assert VALUE in caplog.text
    assert max(world.difference() for world in both) < 1e-4


@pytest.mark.parametrize("wrong", [0, 1], ids=["sglang", "hf"])
def test_until_then_the_content_check_names_the_engine(both, wrong):
    put_behind_the_proof(both[wrong], EMBEDDING, random_state(7)[EMBEDDING])
    with pytest.raises(WeightsDiverged, match=f"{NAMES[wrong]} must score a fixed prompt like the trainer"):
        content_check(dict(zip(NAMES, both, strict=True)), merged(both[0]), PROMPT)


def test_an_engine_that_missed_a_version_pulls_adapters_alone_and_one_without_a_base_pulls_all(synced):
    receiver = synced.worker._built().receiver
    synced.sync(11, receivers=[])
    assert synced.served() == synced.version - 1
    loads = []
    accepts, load = receiver._states.accepts, receiver._load

    async def recorded(manifest, layout, source):
        loads.append(type(source).__name__)
        return await load(manifest, layout, source)

    receiver._load = recorded
    try:
        synced.on_loop(receiver.pull(synced.publisher.address))
        assert loads == ["PatchSource"] and synced.served() == synced.version and synced.difference() < 1e-4
        synced.on_loop(_forget(synced))
        assert not accepts(synced.publisher._adapter_encoder._last.manifest.base_digest)
        synced.on_loop(receiver.pull(synced.publisher.address))
    finally:
        receiver._load = load
    assert loads == ["PatchSource", "SharedSource"] and synced.difference() < 1e-4


def test_an_engine_that_is_lost_between_load_and_use_serves_nothing_until_it_has_all_again(synced, monkeypatch):
    target = synced.worker._built().receiver._target
    resume = target.resume

    async def lost(version, digest):
        synced.worker._built().receiver.forget()
        await resume(version, digest)

    with monkeypatch.context() as patch, pytest.raises(DeadlineExceeded, match="went with the engine's memory"):
        patch.setattr(target, "resume", lost)
        synced.sync(12)
    assert synced.served() == -1
    assert not synced.sync(13).patched and synced.difference() < 1e-4


def test_a_row_in_flight_goes_on_with_the_new_adapter_and_each_token_has_the_version_of_its_own(synced):
    rows = synced.engine.loop if isinstance(synced.worker, HFRolloutWorker) else synced.engine.engine
    for seed in range(20, 30):  # the row may end before it is interrupted
        old, before = synced.served(), merged(synced)
        begun, result = threading.Event(), concurrent.futures.Future()
        params = SamplingParams(max_new_tokens=56, ignore_eos=True)
        row = Row(key=seed, prompt=[3, 4, 5], params=params, seed=1, on_tokens=lambda ids, begun=begun: begun.set())
        rows.submit([row], lambda results, result=result: result.set_result(results[0][1]))
        assert begun.wait(60)
        synced.on_loop(synced.engine.pause(keep_cache=False))
        assert synced.sync(seed).patched
        output = result.result(60)
        if len(output.versions) == 2:
            break
    (start, middle, first), (again, end, second) = output.versions
    assert (start, end, first, second) == (0, 56, old, synced.served()) and middle == again
    found = torch.tensor(output.logprobs)
    assert (found - trainer_logprobs(before, row.prompt, output.ids))[:middle].abs().max() < 1e-4
    assert (found - trainer_logprobs(merged(synced), row.prompt, output.ids))[middle:].abs().max() < 1e-4


def test_an_adapter_that_changes_on_its_way_to_the_engine_is_named_before_the_engine_has_it(
    synced_sglang, monkeypatch, caplog
):
    synced, changed = synced_sglang, []
    target = synced.engine.weight_target
    call = target._call

    def disturbed(method, **arguments):
        if method == "load_adapter" and not changed:
            place = next(place for place in arguments["places"] if place.name == DOWN)
            target._buffer.bytes[place.offset] ^= 1
            changed.append(place)
        return call(method, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(target, "_call", disturbed)
        assert not synced.sync(40).patched
    assert changed and f"1 have others: ['{DOWN}']" in caplog.text
    assert synced.served() == synced.version and synced.difference() < 1e-4


def test_an_engine_that_is_killed_between_load_and_use_is_reported_and_serves_nothing(synced_sglang, monkeypatch):
    synced = synced_sglang
    engine, target = synced.engine.engine, synced.engine.weight_target
    resume = target.resume

    async def killed(version, digest):
        os.kill(engine.pids[1], signal.SIGKILL)
        await resume(version, digest)

    with monkeypatch.context() as patch, pytest.raises(DeadlineExceeded, match="engine"):
        patch.setattr(target, "resume", killed)
        synced.sync(41)
    assert engine.version == -1 and synced.worker.status()["engines_lost"] == 1
