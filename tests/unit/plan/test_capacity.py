"""Memory estimates: the formulas on a hand-counted model, errors that help."""

import re
from dataclasses import replace

import pytest

from rl_core.api.errors import CapacityError
from rl_core.api.job import RLJob, RLJobSpec
from rl_core.plan.capacity import CONTEXT_BYTES, ModelFacts, admit, estimate

GIB = 1024**3
FACTS = ModelFacts(
    parameters=1_000_000,
    layer=200_000,
    hidden=64,
    layers=4,
    vocab=500,
    heads=4,
    kv_heads=2,
    head_dim=16,
    head_norms=False,
    inner=128,
    max_length=256,
)
LAYER = 2 * 64 * (4 + 2 + 2) + 2 * (2 * 4 * 16 + 2 * 2 * 16 + 4 * 128) + 4 * 4
"""Bytes of a token in a layer: norms; query, output, key, value and the feed-forward part; attention's normalisers."""
NORMS, SHARED = 22 * 64, 2 * (3 * 4 * 16 + 3 * 2 * 16 + 5 * 128) + 4 * 4
"""The same under megatron: norms; what tensor ranks share."""
CHUNK = 1024 * 500
"""Logits at a time."""
ENTROPY = 128 * 500 * 4
"""float32 probabilities from which the metric of the entropy is computed at a time; more than the gradient of the head needs."""


def spec(**blocks):
    written = {
        "model": {"path": "model", "dtype": "bfloat16"},
        "data": {"train": "data.jsonl"},
        "algorithm": {"promptsPerStep": 32, "groupSize": 8},
        "actor": {"microBatchTokens": 2048},
        "rollout": {"maxBatch": 16, "maxSequenceLength": 128, "sampling": {"maxNewTokens": 64}},
    }
    for name, fields in blocks.items():
        written[name] = fields if isinstance(fields, list) else written.get(name, {}) | fields
    return RLJobSpec.model_validate(written)


def parts(report, role, phase):
    (row,) = [row for row in report.rows if (row.role, row.phase) == (role, phase)]
    assert row.device == sum(row.parts.values())
    counted = sum(size for name, size in row.parts.items() if name != "margin")
    assert row.parts["margin"] == int(counted * 0.08) and row.parts["context"] == CONTEXT_BYTES
    return {name: size for name, size in row.parts.items() if name not in ("margin", "context")}


def test_fsdp_cuts_everything_and_gathers_what_is_outside_the_layers_and_two_of_them():
    found = parts(estimate(spec(actor={"replicas": 2}), FACTS), "actor", "train")
    assert found == {
        "weights": 500_000 * 4,
        "optimizer": 500_000 * 8,
        "gradients": 500_000 * 4 + 400_000 * 4,
        "gather": (200_000 + 2 * 200_000) * 2,
        "activations": 4 * 2048 * LAYER,
        "logits": CHUNK * 2 + CHUNK * 4 + ENTROPY,
    }


def test_gradients_that_wait_for_the_last_micro_batch_are_whole():
    waits, reduces = (
        parts(estimate(spec(actor={"replicas": 2, **actor}), FACTS), "actor", "train")["gradients"]
        for actor in ({"accumulateWithoutSync": True}, {})
    )
    assert waits == 1_000_000 * 4 and reduces == 500_000 * 4 + 400_000 * 4, (
        "all; a share, what is outside the layers and one of them"
    )


def test_megatron_cuts_over_the_processes_that_share_a_model_and_the_optimizer_over_all():
    actor = {"backend": "megatron", "replicas": 4, "parallel": {"tensor": 2}}
    found = parts(estimate(spec(actor=actor), FACTS), "actor", "train")
    assert found == {
        "weights": 500_000 * 2,
        "gradients": 500_000 * 4,
        "optimizer": 250_000 * 8,
        "master": 250_000 * 4,
        "activations": 4 * 2048 * (NORMS + SHARED // 2),
        "logits": CHUNK // 2 * 2 + CHUNK // 2 * 4 + ENTROPY // 2,
    }
    whole = parts(estimate(spec(actor=actor | {"optimizer": {"distributed": False}}), FACTS), "actor", "idle")
    assert whole["optimizer"] == 500_000 * 8 and whole["master"] == 500_000 * 4


def test_a_stage_has_its_layers_and_the_embedding_and_as_many_micro_batches_as_there_are_stages():
    actor = {"backend": "megatron", "replicas": 2, "parallel": {"pipeline": 2}}
    found = parts(estimate(spec(actor=actor), FACTS), "actor", "train")
    assert found["weights"] == (2 * 200_000 + 500 * 64) * 2 and found["activations"] == 4 * 2048 * (NORMS + SHARED)


def test_sequence_parallel_shares_the_norms_too():
    parallel = {"tensor": 2, "sequence": True}
    actor = {"backend": "megatron", "replicas": 2, "parallel": parallel}
    assert (
        parts(estimate(spec(actor=actor), FACTS), "actor", "train")["activations"] == 4 * 2048 * (NORMS + SHARED) // 2
    )


def test_float32_on_one_process_gathers_nothing():
    found = parts(estimate(spec(model={"dtype": "float32"}), FACTS), "actor", "train")
    assert "gather" not in found and found["weights"] == found["gradients"] == 4_000_000


def test_recomputed_layers_keep_their_inputs_and_one_of_them_all_when_the_logits_are_gone():
    for vocabulary in (500, 50):
        facts = replace(FACTS, vocab=vocabulary)
        found = parts(estimate(spec(actor={"gradientCheckpointing": True}), facts), "actor", "train")
        kept, gradients = 4 * 2048 * 64 * 2, 2048 * 2 * 2 * (128 + 64)
        assert found["activations"] + found["logits"] == kept + max(2048 * LAYER + gradients, found["logits"])


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_a_critic_of_its_own_is_a_second_model_in_training_and_none_for_reference_and_rollouts(backend):
    actor, algorithm = {"backend": backend}, {"name": "gae", "rewardKlCoefficient": 0.1}
    with_head = spec(algorithm=algorithm, actor=actor)
    apart = spec(algorithm=algorithm | {"critic": {"separate": True}}, actor=actor)
    one, two = (parts(estimate(job, FACTS), "actor", "train") for job in (with_head, apart))
    doubled = {"weights", "master", "optimizer", "gradients", "activations"}
    assert two == {name: size * (2 if name in doubled else 1) for name, size in one.items()}
    assert estimate(with_head, FACTS).peak("rollout") == estimate(apart, FACTS).peak("rollout")


def test_a_loss_with_entropy_has_a_second_block_of_logits_backwards():
    with_entropy = {"promptsPerStep": 32, "groupSize": 8, "loss": {"entropyCoefficient": 0.1}}
    one, two = (estimate(spec(algorithm=block), FACTS) for block in ({"promptsPerStep": 32}, with_entropy))
    more = parts(two, "actor", "train")["logits"] - parts(one, "actor", "train")["logits"]
    assert more == 4 * CHUNK + 500 * 64 * 6 - ENTROPY
    assert parts(two, "actor", "logprob")["logits"] == parts(one, "actor", "logprob")["logits"]


QWEN3_8B = ModelFacts(
    parameters=8_190_735_360,
    layer=192_946_432,
    hidden=4096,
    layers=36,
    vocab=151_936,
    heads=32,
    kv_heads=8,
    head_dim=128,
    inner=12_288,
    max_length=40_960,
    head_norms=True,
)


def test_a_model_of_8b_trains_on_four_devices_of_40_gib_with_its_optimizer_state_on_the_host():
    actor = {"replicas": 4, "gpus": 1, "gradientCheckpointing": True, "microBatchTokens": 4096}
    report = estimate(spec(actor=actor, rollout={"gpus": 1}), QWEN3_8B, device_memory=40 * GIB)
    with pytest.raises(CapacityError, match=r"largest part optimizer .*; it fits with actor\.offload\.optimizer true"):
        report.check("actor")
    offloaded = estimate(
        spec(actor=actor | {"offload": {"optimizer": True}}, rollout={"gpus": 1}), QWEN3_8B, device_memory=40 * GIB
    )
    offloaded.check("actor")
    share = 2_047_683_840
    moved = {
        row.phase: row.host - before.host
        for row in offloaded.rows
        for before in report.rows
        if row.role == before.role == "actor" and row.phase == before.phase
    }
    assert moved == {"load": 0, "train": share * 8, "logprob": share * 8, "sync": share * 8, "idle": share * 8}
    assert "optimizer" not in parts(offloaded, "actor", "train")
    update = {"weights": share * 4, "gradients": share * 4, "optimizer": share * 8}
    assert parts(offloaded, "actor", "update") == update
    with pytest.raises(
        CapacityError, match=r"phase update: .*largest part optimizer .*; it fits with actor\.replicas 4"
    ):
        estimate(
            spec(actor=actor | {"offload": {"optimizer": True}, "replicas": 2}), QWEN3_8B, device_memory=40 * GIB
        ).check("actor")


def test_each_part_that_is_offloaded_is_away_in_the_phases_that_do_not_need_it():
    actor = {"backend": "megatron", "offload": {"params": True, "grads": True, "optimizer": True}}
    report = estimate(spec(actor=actor), FACTS)
    everything = {"weights", "gradients", "optimizer", "master"}
    held = {
        row.phase: everything & parts(report, "actor", row.phase).keys() for row in report.rows if row.role == "actor"
    }
    assert held == {
        "load": everything,
        "train": {"weights", "gradients"},
        "update": everything,
        "logprob": {"weights", "gradients"},
        "sync": {"weights"},
        "idle": set(),
    }


def test_colocated_the_optimizer_state_that_is_offloaded_is_not_beside_the_activations():
    colocated = {"placement": {"mode": "colocated"}}
    report = estimate(spec(actor={"offload": {"optimizer": True, "params": True}}, **colocated), FACTS)
    assert "optimizer" not in parts(report, "actor", "train") and "optimizer" in parts(report, "actor", "update")
    assert (
        parts(report, "actor", "sync")["weights"] == 4_000_000
        and parts(report, "actor", "sync")["neighbour"] > CONTEXT_BYTES
    )


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_a_reference_policy_lies_on_the_host_in_the_type_of_the_model(backend):
    """FSDP also holds the trained float32 weights on the device while it scores, Megatron has the room of its gradients for them."""
    settings = {"algorithm": {"promptsPerStep": 32, "groupSize": 8, "loss": {"klCoefficient": 0.1}}}
    report = estimate(spec(**settings, actor={"backend": backend}), FACTS)
    assert {row.host for row in report.rows if (row.role, row.phase) == ("actor", "train")} == {2_000_000 + 2_000_000}
    beside = {"fsdp2": 4_000_000, "megatron": None}[backend]
    assert parts(report, "actor", "logprob").get("reference") == beside
    assert "reference" not in parts(report, "actor", "train")


def test_an_asynchronous_checkpoint_has_a_copy_of_float32_weights_and_moments_on_the_host():
    report = estimate(spec(checkpoint={"asynchronous": True}), FACTS)
    assert {row.host for row in report.rows if (row.role, row.phase) == ("actor", "train")} == {2_000_000 + 12_000_000}
    cut = spec(actor={"backend": "megatron", "replicas": 4}, checkpoint={"asynchronous": True})
    assert {row.host for row in estimate(cut, FACTS).rows if row.phase == "train"} == {2_000_000 + 3_000_000}


def test_micro_batch_is_never_larger_than_the_rows_of_an_optimizer_step():
    report = estimate(spec(algorithm={"promptsPerStep": 1, "groupSize": 8, "optimizerStepsPerBatch": 2}), FACTS)
    assert parts(report, "actor", "train")["activations"] == 4 * 4 * 128 * LAYER


def test_generation_counts_weights_cache_and_logits():
    found = parts(estimate(spec(), FACTS), "rollout", "generate")
    assert found == {
        "weights": 2_000_000,
        "kv_cache": 2 * 4 * 2 * 16 * 2 * 16 * 128,
        "logits": 16 * 500 * 8,
    }


def test_sglang_cuts_weights_and_cache_over_the_accelerators_of_its_pod():
    found = parts(estimate(spec(rollout={"engine": "sglang", "gpus": 4}), FACTS), "rollout", "generate")
    # Two key-value heads on four ranks: each has one.
    assert found.pop("engine") > 0
    assert found == {"weights": 500_000, "kv_cache": 2 * 4 * 1 * 16 * 2 * 128, "logits": 16 * 125 * 8}


def test_where_the_estimate_is_wrong_a_variable_lets_the_job_go_on(monkeypatch, caplog):
    report = estimate(spec(actor={"gpus": 1}), FACTS, device_memory=GIB)
    with pytest.raises(
        CapacityError, match=r"(?s)got 1\.00 GiB available.*set the environment variable CAPACITY_CHECK=warn"
    ):
        admit(report, "actor")
    admit(report, "rollout")
    monkeypatch.setenv("CAPACITY_CHECK", "warn")
    admit(report, "actor")
    assert "so the job continues: role actor" in caplog.text


def test_sync_holds_two_buckets_and_a_host_copy():
    report = estimate(spec(weights={"bucketBytes": 1 << 20}), FACTS)
    assert parts(report, "rollout", "sync")["buckets"] == parts(report, "actor", "sync")["buckets"] == 2 << 20
    assert {row.host for row in report.rows if (row.role, row.phase) == ("actor", "sync")} == {2_000_000}


def test_colocated_roles_have_the_device_one_after_the_other_and_their_weights_for_a_sync_together():
    apart, found = estimate(spec(), FACTS), estimate(spec(placement={"mode": "colocated"}), FACTS)
    for role, phase in (("actor", "train"), ("rollout", "generate")):
        assert parts(found, role, phase) == parts(apart, role, phase) | {"neighbour": CONTEXT_BYTES}
    assert parts(found, "actor", "sync").keys() == {"weights", "gather", "buckets", "neighbour"}
    assert parts(found, "rollout", "sync")["neighbour"] == CONTEXT_BYTES + parts(apart, "actor", "idle")["weights"]
    assert parts(found, "rollout", "idle") == {"neighbour": CONTEXT_BYTES}
    hosts = {row.role: row.host for row in found.rows if row.phase == "idle"}
    assert hosts["rollout"] == sum(parts(apart, "rollout", "idle").values())


@pytest.mark.parametrize(
    ("weights", "placement", "more", "counts"),
    [
        ({}, {}, {}, "optional"),
        ({"transport": "nccl"}, {}, {}, "optional"),
        ({"transport": "ipc"}, {"mode": "colocated"}, {"rollout": {"gpus": 1}}, "needed"),
        ({"transport": "gloo"}, {}, {}, "none"),
        ({"transport": "zmq"}, {}, {}, "none"),
        ({"syncer": "patch"}, {}, {}, "none"),
        ({}, {}, {"model": {"lora": {"rank": 8}}}, "none"),
        ({}, {}, {"actor": {"gpus": 0}}, "none"),
    ],
    ids=["auto", "nccl", "ipc", "gloo", "zmq", "patch", "adapters", "cpu"],
)
def test_the_copy_of_a_version_on_the_trainers_device_is_counted_where_there_is_one(weights, placement, more, counts):
    written = spec(**{"actor": {"gpus": 1}, **more}, weights=weights, placement=placement)
    report = estimate(written, FACTS, device_memory=64 * GIB)
    (sync,) = (row for row in report.rows if (row.role, row.phase) == ("actor", "sync"))
    assert sync.parts.get("publisher_copy", 0) == (0 if counts == "none" else 2_000_000)
    assert sync.optional == (2_160_000 if counts == "optional" else 0)


@pytest.mark.parametrize(("gpus", "buckets"), [(1, 2), (2, 3)])
def test_a_bucket_that_is_broadcast_to_copies_on_other_devices_of_the_trainer_is_counted(gpus, buckets):
    group = {"gpus": gpus}
    written = spec(actor=group, rollout=group, weights={"bucketBytes": 1 << 20}, placement={"mode": "colocated"})
    assert parts(estimate(written, FACTS), "actor", "sync")["buckets"] == buckets << 20


def test_a_job_is_not_refused_for_a_copy_without_which_weights_go_through_the_host():
    huge = replace(FACTS, parameters=10_000_000_000, layer=2_000_000_000)
    written = spec(actor={"gpus": 1, "replicas": 32, "offload": {"optimizer": True, "params": True, "grads": True}})
    report = estimate(written, huge, device_memory=24 * GIB)
    peak = max(row.device - row.optional for row in report.rows if row.role == "actor")
    (sync,) = (row for row in report.rows if (row.role, row.phase) == ("actor", "sync"))
    assert sync.device > peak
    estimate(written, huge, device_memory=peak).check("actor")
    with pytest.raises(CapacityError):
        estimate(written, huge, device_memory=peak - 1).check("actor")


def test_peak_is_the_largest_phase_of_a_role():
    report = estimate(spec(), FACTS)
    assert report.peak("actor") == max(row.device for row in report.rows if row.role == "actor")
    with pytest.raises(KeyError, match="critic"):
        report.peak("critic")


def test_every_phase_of_the_table_is_there():
    phases = {(row.role, row.phase) for row in estimate(spec(), FACTS).rows}
    assert {phase for role, phase in phases if role == "actor"} == {"load", "train", "logprob", "sync", "idle"}
    assert {phase for role, phase in phases if role == "rollout"} == {"load", "generate", "sync", "idle"}


def test_shortage_names_role_phase_sizes_largest_part_and_way_out():
    report = estimate(
        spec(actor={"gpus": 1}, rollout={"gpus": 1}), replace(FACTS, vocab=500_000), device_memory=2 * GIB
    )
    with pytest.raises(
        CapacityError, match=r"role actor, phase train: needs .* GiB of device memory, got 2.00 GiB"
    ) as caught:
        report.check()
    assert "largest part logits" in str(caught.value) and "actor.microBatchTokens" in str(caught.value)
    report.check("rollout")


@pytest.mark.parametrize(
    ("actor", "gib", "expected"),
    [
        ({"microBatchTokens": 16384}, 80, "actor.gradientCheckpointing true"),
        ({}, 40, "actor.gradientCheckpointing true and actor.offload.optimizer true"),
        (
            {"gradientCheckpointing": True, "accumulateWithoutSync": True},
            53,
            "actor.accumulateWithoutSync false",
        ),
        ({"gradientCheckpointing": True}, 30, "actor.offload.optimizer true and actor.replicas 8"),
    ],
)
def test_a_shortage_of_the_trainer_names_the_settings_with_which_it_fits(actor, gib, expected):
    actor = {"replicas": 4, "gpus": 1, "microBatchTokens": 4096} | actor
    job = spec(actor=actor, rollout={"gpus": 1, "maxSequenceLength": 4096})
    with pytest.raises(CapacityError, match=f"; it fits with {re.escape(expected)}$"):
        estimate(job, QWEN3_8B, device_memory=gib * GIB).check("actor")


def test_more_pods_of_a_colocated_trainer_come_with_as_many_rollouts():
    actor = {"replicas": 4, "gpus": 1, "gradientCheckpointing": True, "offload": {"optimizer": True}}
    rollout = {"gpus": 1, "replicas": 4}
    job = spec(actor=actor, rollout=rollout, placement={"mode": "colocated"})
    with pytest.raises(CapacityError, match=r"; it fits with actor\.replicas 8 and rollout\.replicas 8$"):
        estimate(job, QWEN3_8B, device_memory=30 * GIB).check("actor")


def qwen3_8b(*, gib=80, algorithm=None, placement=None, **blocks):
    """Return the estimate of the job that somebody new writes first: one pod for each group, default batch."""
    sglang = {"engine": "sglang", "gpus": 1, "maxBatch": 128, "maxSequenceLength": 4096}
    actor = {"gpus": 1, "microBatchTokens": 16384} | blocks.get("actor", {})
    job = spec(actor=actor, rollout=sglang | blocks.get("rollout", {}), placement=placement or {})
    return estimate(job, QWEN3_8B, device_memory=int(gib * GIB))


def test_all_groups_that_do_not_fit_are_told_at_once():
    report = qwen3_8b(rollout={"engine": "hf"})
    with pytest.raises(CapacityError) as refused:
        report.check()
    actor, rollout = str(refused.value).splitlines()
    assert actor.startswith("role actor, phase train:") and rollout.startswith("role rollout, phase ")


def test_more_devices_are_asked_for_with_gradient_checkpointing_and_some_room_and_those_given_count():
    one, two = (qwen3_8b(actor={"gpus": gpus}) for gpus in (1, 2))
    assert "actor.gradientCheckpointing true" in one.fits_with["actor"]
    assert one.fits_with["actor"].endswith("actor.gpus 2") and "gpus" not in two.fits_with["actor"]
    wanted = {"gpus": 2, "gradientCheckpointing": True, "offload": {"optimizer": True}}
    assert (
        max(row.device - row.optional for row in qwen3_8b(actor=wanted).rows if row.role == "actor") < 0.95 * 80 * GIB
    )


@pytest.mark.parametrize("batch", [1, 128, 4096])
def test_sglang_is_not_refused_for_sequences_that_wait_in_its_queue(batch):
    report = qwen3_8b(rollout={"maxBatch": batch})
    report.check("rollout")
    # 144 KiB of keys and values per token: 0.83 of 80 GiB without the weights and the context.
    token, weights = 2 * 36 * 8 * 128 * 2, 2 * QWEN3_8B.parameters
    assert report.pool.sequences == int(0.83 * 80 * GIB - weights - CONTEXT_BYTES) // token // 4096 == 89


def test_the_share_of_the_device_that_sglang_may_have_counts(caplog):
    small = {"engineArgs": {"mem_fraction_static": 0.22}}
    report = qwen3_8b(rollout=small)
    assert report.pool.sequences == 2 and report.pool.small
    admit(report, "rollout")
    assert "mem_fraction_static 0.22) holds 2 sequences of rollout.maxSequenceLength at a time, of 128" in caplog.text
    with pytest.raises(CapacityError, match=r"role rollout, phase generate: .* it fits with rollout\.gpus 2$"):
        qwen3_8b(rollout={"engineArgs": {"mem_fraction_static": 0.19}}).check("rollout")


@pytest.mark.parametrize("fraction", [0.3, 0.5, 0.83, 0.95])
@pytest.mark.parametrize("length", [1024, 16_384])
def test_sglang_fits_on_exactly_the_devices_whose_pool_holds_a_sequence(fraction, length):
    for gib in range(17, 70):
        report = qwen3_8b(
            gib=gib,
            rollout={"engineArgs": {"mem_fraction_static": fraction}, "maxSequenceLength": length, "maxBatch": 1},
        )
        generate = next(row.device for row in report.rows if (row.role, row.phase) == ("rollout", "generate"))
        if report.pool.sequences == 0:
            assert generate >= report.device_memory
        elif fraction < 0.9:  # above, it is the margin that needs more
            assert generate <= report.device_memory


def test_a_rollout_with_a_cache_of_its_own_is_told_the_batch_that_fits():
    report = qwen3_8b(rollout={"engine": "hf"})
    assert report.fits_with["rollout"] == "rollout.maxBatch 64"
    qwen3_8b(rollout={"engine": "hf", "maxBatch": 64}).check("rollout")
    assert qwen3_8b(gib=16, rollout={"engine": "hf"}).fits_with["rollout"] == "rollout.engine sglang and rollout.gpus 2"


def test_a_trainer_that_fits_by_no_setting_is_told_its_largest_part():
    tiny = estimate(spec(actor={"gpus": 1}, rollout={"gpus": 1}), QWEN3_8B, device_memory=2 * GIB)
    assert tiny.fits_with == {}
    with pytest.raises(CapacityError, match="largest part"):
        tiny.check("actor")


def test_the_critic_in_a_group_of_its_own_is_a_trainer_without_logits():
    group = {"name": "critic", "worker": "rl_core.groups.critic:Critic", "lifecycle": "gang", "callers": ["actor"]}
    job = spec(algorithm={"name": "gae", "critic": {"group": "critic"}}, groups=[group | {"gpus": 1}])
    report = estimate(job, FACTS)
    found = parts(report, "critic", "train")
    assert found["logits"] == 0 and found["optimizer"] == 1_000_000 * 8 and found["activations"] > 0
    assert {row.phase for row in report.rows if row.role == "critic"} == {"load", "train", "values", "idle"}
    assert {row.host for row in report.rows if row.role == "critic"} == {0}, "it publishes nothing"


def test_cpu_processes_of_a_pod_share_its_host_memory():
    many = spec(actor={"processesPerPod": 4})
    estimate(many, FACTS, host_memory=8 * GIB).check()
    with pytest.raises(CapacityError, match="role actor.*host memory, got 3.00 GiB"):
        estimate(many, FACTS, host_memory=3 * GIB).check()


def test_a_whole_job_is_estimated_as_its_spec():
    written = spec()
    job = RLJob(api_version="rljob.dev/v1alpha1", kind="RLJob", metadata={"name": "sums"}, spec=written)
    assert estimate(job, FACTS) == estimate(written, FACTS)


def test_unknown_memory_is_not_checked():
    estimate(spec(), replace(FACTS, parameters=10**15)).check()
