"""One rank's model and optimizer: steps, skips, state, checkpoints, offload verbs."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from rl_core.actors.device import allocator_settings
from rl_core.actors.fsdp.manager import FSDPModelManager
from rl_core.actors.fsdp.strategy import FSDP2Strategy
from rl_core.actors.ranks import Ranks
from rl_core.api.errors import ConfigError, DataError, InfrastructureError
from rl_core.checkpoint.state import derive_rng
from rl_core.checkpoint.store import CheckpointStore


@pytest.fixture
def make_manager(make_spec):
    def make(**changes):
        manager = FSDPModelManager(make_spec(**changes), 1, 0)
        manager.setup_model_and_optimizer()
        return manager

    return make


def set_grads(manager, value=0.1):
    for index, parameter in enumerate(manager.model.parameters()):
        parameter.grad = torch.full_like(parameter, value * (1 + index % 3))


def weights(manager):
    return {name: tensor.clone() for name, tensor in manager.get_model_state_dict(True, True).items()}


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_set_up_twice_is_refused(make_manager):
    with pytest.raises(RuntimeError, match="once"):
        make_manager().setup_model_and_optimizer()


def test_segments_of_the_allocator_grow_unless_the_job_says_otherwise_or_hands_memory_to_rollouts(make_spec):
    settings = allocator_settings(make_spec(actor__gpus=1), {})
    assert settings == "expandable_segments:True"
    torch._C._accelerator_setAllocatorSettings(settings)  # raises for a setting that this torch does not know
    assert allocator_settings(make_spec(actor__gpus=1), {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}) is None
    assert allocator_settings(make_spec(actor__gpus=1), {"PYTORCH_ALLOC_CONF": ""}) is None
    shared = make_spec(placement__mode="colocated", actor__gpus=1, rollout__gpus=1)
    assert allocator_settings(shared, {}) is None


def test_ranks_that_read_and_write_files_wait_for_each_other_as_long_as_the_runner_does(
    make_spec, tmp_path, monkeypatch
):
    deadlines = {"waitReady": 700, "groupMethod": 4000, "collective": 30}
    limits, within = [], Ranks.collectives_within
    manager = FSDPModelManager(make_spec(runtime__deadlines=deadlines), 1, 0)
    monkeypatch.setattr(Ranks, "collectives_within", lambda ranks, limit: limits.append(limit) or within(ranks, limit))
    manager.setup_model_and_optimizer()
    manager.save_checkpoint(str(tmp_path), 1)
    manager.load_checkpoint(str(tmp_path))
    manager.export_hf(str(tmp_path / "out"))
    assert limits == [700, 4000, 4000, 4000]


def test_a_mapping_is_validated_and_unknown_keys_are_errors(make_spec):
    plain = make_spec().model_dump(by_alias=True, mode="json")
    assert FSDPModelManager(plain, 1, 0).cfg == make_spec()
    with pytest.raises(ValueError, match="wrong"):
        FSDPModelManager(plain | {"wrong": 1}, 1, 0)


def test_accelerators_asked_for_and_not_there_are_refused(make_spec):
    if torch.cuda.is_available():
        pytest.skip("this machine has accelerators")
    with pytest.raises(ConfigError, match=r"actor\.gpus"):
        FSDPModelManager(make_spec(actor__gpus=1), 1, 0)


def test_optimizer_state_exists_from_the_start_and_changes_no_weight(make_manager):
    manager = make_manager()
    before = weights(manager)
    parameters = list(manager.model.parameters())
    assert all(manager.optimizer.state[p]["exp_avg"].eq(0).all() for p in parameters)
    assert equal(weights(manager), before)
    decays = {
        group["weight_decay"] for group in manager.optimizer.param_groups if all(p.dim() == 1 for p in group["params"])
    }
    assert decays == {0.0}


def test_a_step_equals_torch_adamw_on_clipped_gradients(make_manager):
    manager = make_manager()
    twins = [parameter.detach().clone().requires_grad_() for parameter in manager.model.parameters()]
    groups = [
        {"params": [p for p in twins if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in twins if p.dim() == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    for _ in range(3):
        set_grads(manager)
        for twin, parameter in zip(twins, manager.model.parameters(), strict=True):
            twin.grad = parameter.grad.clone()
        norm, rates = manager.optimizer_step()
        expected = torch.nn.utils.clip_grad_norm_(twins, 0.5)
        reference.step()
        assert norm == pytest.approx(float(expected), rel=1e-6)
        assert rates == [1e-3, 1e-3]
    for twin, parameter in zip(twins, manager.model.parameters(), strict=True):
        assert torch.allclose(twin, parameter, atol=1e-7)
    assert all(parameter.grad is None for parameter in manager.model.parameters())


def test_without_a_clip_gradients_are_only_measured(make_manager):
    manager = make_manager(actor__gradClip=None)
    set_grads(manager)
    expected = math.sqrt(sum(float(p.grad.double().square().sum()) for p in manager.model.parameters()))
    assert manager.optimizer_step()[0] == pytest.approx(expected)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_changes_nothing(make_manager, bad):
    manager = make_manager(actor__optimizer={"learningRate": 1e-3, "schedule": {"style": "linear", "warmupSteps": 4}})
    set_grads(manager)
    manager.optimizer_step()
    before, rate = weights(manager), manager.scheduler.get_last_lr()
    moments = [state["exp_avg"].clone() for state in manager.optimizer.state.values()]
    set_grads(manager, bad)
    norm, _ = manager.optimizer_step()
    assert not math.isfinite(norm)
    assert equal(weights(manager), before) and manager.scheduler.get_last_lr() == rate
    for moment, state in zip(moments, manager.optimizer.state.values(), strict=True):
        assert torch.equal(moment, state["exp_avg"]) and state["step"] == 1
    assert (manager.counts.attempted, manager.counts.applied, manager.counts.skipped) == (2, 1, 1)
    assert all(p.grad is None for p in manager.model.parameters())


def test_too_many_skips_in_a_row_are_a_data_error_and_a_good_step_starts_the_count_again(make_manager):
    manager = make_manager(actor__maxConsecutiveSkips=1)
    for bad in (math.inf, 0.1, math.inf):
        set_grads(manager, bad)
        manager.optimizer_step()
    set_grads(manager, math.nan)
    with pytest.raises(DataError, match=r"actor\.maxConsecutiveSkips allows 1 .* got 2 with norms \[inf, nan\]"):
        manager.optimizer_step()


def test_the_schedule_counts_applied_steps(make_manager):
    manager = make_manager(actor__optimizer={"learningRate": 1.0e-3, "schedule": {"warmupSteps": 4}})
    rates = []
    for _ in range(5):
        set_grads(manager)
        rates.append(manager.optimizer_step()[1][0])
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


def test_state_dicts_hold_all_names_and_share_memory_unless_asked(make_manager):
    manager = make_manager()
    live, copied = manager.get_model_state_dict(False, True), manager.get_model_state_dict(True, True)
    assert live.keys() == copied.keys() == manager.model.state_dict().keys()
    name = "model.norm.weight"
    assert live[name].data_ptr() == manager.model.model.norm.weight.data_ptr() != copied[name].data_ptr()
    shards = manager.get_model_state_dict(False, False)
    assert all(isinstance(shard, DTensor) for shard in shards.values())
    assert shards[name].to_local().data_ptr() == live[name].data_ptr()


def test_critic_warm_up_needs_a_value_head(make_manager):
    manager = make_manager()
    with pytest.raises(ConfigError, match="value_head"):
        manager.build_optimizer(manager.model, enable_critic_warmup=True)


@pytest.mark.parametrize("bad", [-1, 4])
def test_the_global_step_only_rises(make_manager, bad):
    manager = make_manager()
    manager.set_global_step(5)
    with pytest.raises(ValueError, match=r"must be 5 or more, got"):
        manager.set_global_step(bad)


def train_twice(manager):
    norms = []
    for _ in range(2):
        set_grads(manager, float(torch.rand(())))  # the draw comes from the saved random state
        norms.append(manager.optimizer_step())
    return norms, weights(manager)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_manager_goes_on_bit_for_bit(make_manager, tmp_path, dtype):
    schedule = {"learningRate": 1e-2, "schedule": {"style": "cosine", "warmupSteps": 2}}
    manager = make_manager(model__dtype=dtype, actor__optimizer=schedule)
    set_grads(manager)
    manager.optimizer_step()
    manager.set_global_step(7)
    manager.save_checkpoint(str(tmp_path), 7)
    expected = train_twice(manager)
    resumed = make_manager(model__dtype=dtype, actor__optimizer=schedule)
    torch.manual_seed(99)
    resumed.load_checkpoint(str(tmp_path))
    assert resumed.global_step == 7 and resumed.counts.applied == 1
    norms, after = train_twice(resumed)
    assert norms == expected[0] and equal(after, expected[1])
    assert resumed.counts == manager.counts


def test_the_sharded_and_the_plain_layout_load_each_other(make_manager, tmp_path, monkeypatch):
    plain = make_manager()
    set_grads(plain)
    plain.optimizer_step()
    plain.save_checkpoint(str(tmp_path / "plain"), 1)
    monkeypatch.setattr(FSDP2Strategy, "is_sharded", property(lambda self: True))
    sharded = make_manager()
    assert all(isinstance(p, DTensor) for p in sharded.model.parameters())
    sharded.load_checkpoint(str(tmp_path / "plain"))
    assert equal(weights(sharded), weights(plain))
    set_grads(sharded)
    set_grads(plain)
    assert sharded.optimizer_step()[0] == pytest.approx(plain.optimizer_step()[0], rel=1e-6)
    sharded.save_checkpoint(str(tmp_path / "sharded"), 2)
    monkeypatch.undo()
    again = make_manager()
    again.load_checkpoint(str(tmp_path / "sharded"))
    assert equal(weights(again), weights(sharded))


def test_a_load_leaves_what_is_offloaded_away(make_manager, tmp_path):
    trained, other = make_manager(), make_manager()
    set_grads(trained)
    trained.optimizer_step()
    trained.save_checkpoint(str(tmp_path), 1)
    other.offload_param_and_grad()
    other.offload_optimizer()
    other.load_checkpoint(str(tmp_path))
    assert other.residency.weights_offloaded and other.residency.optimizer_offloaded
    other.load_param_and_grad(0)
    other.load_optimizer(0)
    assert equal(weights(other), weights(trained))
    moments = [[state["exp_avg"] for state in manager.optimizer.state.values()] for manager in (other, trained)]
    assert all(map(torch.equal, *moments))


@pytest.mark.parametrize("world_size", [1, 2])
def test_random_state_comes_back_on_the_world_that_saved_it_and_is_derived_on_another(
    make_manager, tmp_path, world_size
):
    manager = make_manager(algorithm__seed=5)
    torch.manual_seed(1)
    manager.save_checkpoint(str(tmp_path), 3)
    counters = json.loads((tmp_path / "actor.json").read_text())
    (tmp_path / "actor.json").write_text(json.dumps(counters | {"world_size": world_size}))
    saved = torch.rand(4)
    derive_rng(5, 3, 0)
    derived = torch.rand(4)
    manager.load_checkpoint(str(tmp_path))
    assert torch.equal(torch.rand(4), saved if world_size == 1 else derived)


def test_an_export_has_the_type_asked_for_and_leaves_offloaded_weights_away(make_manager, tmp_path):
    manager = make_manager()
    expected = weights(manager)
    manager.offload_param_and_grad()
    manager.export_hf(str(tmp_path / "model"), dtype="bfloat16")
    assert manager.residency.weights_offloaded
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert all(tensor.equal(expected[name].bfloat16()) for name, tensor in exported.items())
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(ConfigError, match="dtype must be one of float32, bfloat16, got 'float16'"):
        manager.export_hf(str(tmp_path / "model"), dtype="float16")


def test_load_verifies_the_manifest(make_manager, tmp_path):
    manager = make_manager()
    store = CheckpointStore(tmp_path, keep=2)
    manager.save_checkpoint(str(store.begin(1, 0)), 1)
    published = store.publish()
    manager.load_checkpoint(str(published.path))
    shard = next((published.path / "model").iterdir())
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError, match=f"{shard.name} has digest"):
        manager.load_checkpoint(str(published.path))


def test_a_checkpoint_with_the_grad_scaler_that_once_was_saved_is_read(make_manager, tmp_path):
    manager = make_manager()
    set_grads(manager)
    manager.optimizer_step()
    manager.save_checkpoint(str(tmp_path), 1)
    path = tmp_path / "actor.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scaler": {}}))
    resumed = make_manager()
    resumed.load_checkpoint(str(tmp_path))
    assert resumed.counts.applied == 1 and equal(weights(resumed), weights(manager))


def test_missing_and_foreign_checkpoints_are_told_apart(make_manager, tmp_path):
    manager = make_manager()
    with pytest.raises(FileNotFoundError, match=r"actor\.json"):
        manager.load_checkpoint(str(tmp_path / "nowhere"))
    manager.save_checkpoint(str(tmp_path), 1)
    path = tmp_path / "actor.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 0}))
    with pytest.raises(DataError, match="must have format 1, got 0"):
        manager.load_checkpoint(str(tmp_path))


def test_a_save_that_finds_no_room_is_an_infrastructure_error(make_manager, tmp_path):
    manager = make_manager()
    (tmp_path / "actor.json").symlink_to("/dev/full")
    with pytest.raises(InfrastructureError, match="step 3, part of actor rank 0 could not be written .*No space left"):
        manager.save_checkpoint(str(tmp_path), 3)


def test_dropout_beside_recomputed_log_probs_is_refused_where_the_model_has_any(make_spec, model_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    wanted = {"actor__dropout": True, "algorithm__recomputeLogProbs": True}
    FSDPModelManager(make_spec(**wanted), 1, 0).setup_model_and_optimizer()
    with pytest.raises(ConfigError, match=r"actor\.dropout must be false .*dropout 0\.1"):
        FSDPModelManager(make_spec(**wanted, model__path=str(folder)), 1, 0).setup_model_and_optimizer()


def test_a_step_without_its_moments_is_refused_before_anything_changes(make_manager):
    manager = make_manager()
    set_grads(manager)
    manager.offload_optimizer()
    with pytest.raises(RuntimeError, match="optimizer_step needs the moments.*load_optimizer"):
        manager.optimizer_step()
    assert manager.counts.attempted == 0


def test_offloaded_weights_are_away_and_back_bit_for_bit(make_manager, tmp_path):
    manager = make_manager()
    set_grads(manager)
    manager.optimizer_step()
    before, objects = weights(manager), [id(p) for p in manager.model.parameters()]
    manager.offload_param_and_grad(True)
    manager.offload_param_and_grad(True)
    manager.offload_optimizer()
    assert (
        manager.residency.weights_offloaded
        and manager.residency.optimizer_offloaded
        and manager.residency.gradients_offloaded
    )
    assert all(p.untyped_storage().nbytes() == 0 for p in manager.model.parameters())
    assert all(
        s["exp_avg"].untyped_storage().nbytes() == 0 and s["step"] == 1 for s in manager.optimizer.state.values()
    )
    assert manager.residency.metrics["offload/bytes"] > 0
    with pytest.raises(RuntimeError, match="offloaded"):
        manager.get_model_state_dict(True, True)
    manager.save_checkpoint(str(tmp_path), 1)
    assert manager.residency.weights_offloaded and manager.residency.optimizer_offloaded
    manager.load_param_and_grad(0, True)
    manager.load_optimizer(0)
    assert equal(weights(manager), before) and [id(p) for p in manager.model.parameters()] == objects
    assert not manager.residency.gradients_offloaded and all(not p.grad.any() for p in manager.model.parameters())


def test_what_a_manager_occupies_is_what_it_was_told_and_all_comes_back_bit_for_bit(make_manager):
    manager = make_manager()
    set_grads(manager)
    manager.optimizer_step()
    before = weights(manager)
    held = lambda: [  # noqa: E731
        bool(sum(tensor.untyped_storage().nbytes() for tensor in tensors()))
        for tensors in (manager.weight_tensors, manager.moment_tensors)
    ]
    for parts, expected in (
        (["weights", "gradients", "optimizer"], [True, True]),
        (["weights"], [True, False]),
        ([], [False, False]),
        ([], [False, False]),
    ):
        manager.residency.occupy(parts)
        assert held() == expected and manager.residency.gradients_offloaded == ("gradients" not in parts)
    with manager.residency.loaded(moments=False):
        assert held() == [True, False]
    assert held() == [False, False]
    manager.residency.occupy(["weights", "gradients", "optimizer"])
    assert equal(weights(manager), before) and held() == [True, True]
    set_grads(manager)
    with pytest.raises(RuntimeError, match="between backward and optimizer_step"):
        manager.residency.occupy([])


def test_gradients_waiting_for_their_step_cannot_be_dropped(make_manager):
    manager = make_manager()
    set_grads(manager)
    with pytest.raises(RuntimeError, match="between backward and optimizer_step"):
        manager.offload_param_and_grad(True)
    manager.optimizer_step()
    manager.offload_param_and_grad(True)
