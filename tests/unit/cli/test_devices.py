"""A job starts only where there are as many accelerators as it asks for; those that roles share count once."""

import json

import pytest

from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJob
from rl_core.cli import run

CONFIG = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


def job(folder, mode, gpus):
    spec = {
        "model": {"path": str(folder)},
        "data": {"train": "train.jsonl"},
        "placement": {"mode": mode},
        "actor": {"gpus": gpus},
        "rollout": {"gpus": gpus, "replicas": 1},
    }
    return RLJob.model_validate(
        {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "job"}, "spec": spec}
    )


@pytest.mark.parametrize("visible", [0, 1, 2])
def test_colocated_roles_need_their_accelerators_once(monkeypatch, tmp_path, visible):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(run, "device_sizes", lambda: [10**12] * visible)
    run.check_devices(job(tmp_path, "disaggregated", 0))
    for mode, wanted in (("colocated", 1), ("disaggregated", 2)):
        if visible >= wanted:
            run.check_devices(job(tmp_path, mode, 1))
        else:
            with pytest.raises(ConfigError, match=f"asks for {wanted} accelerators, got {visible} visible"):
                run.check_devices(job(tmp_path, mode, 1))


def test_devices_that_the_shell_selects_are_those_of_the_run_or_it_does_not_start(monkeypatch, tmp_path):
    """A run takes the first accelerators, which may be those of other users."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(run, "device_sizes", lambda: [10**12] * 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    run.check_devices(job(tmp_path, "disaggregated", 1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    run.check_devices(job(tmp_path, "disaggregated", 0))
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES must begin with 0,1 or be unset, .* got 2,3; unset it"):
        run.check_devices(job(tmp_path, "disaggregated", 1))
