"""Backends and offloading in whole runs: with one engine batch per group nothing of a result depends on either."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl_core.checkpoint.manifest import read_manifest
from rl_core.checkpoint.tensors import read_shards

COMMON = {
    "algorithm": {
        "name": "gae",
        "critic": {"valueClip": 0.2, "lam": 0.95},
        "steps": 2,
        "optimizerStepsPerBatch": 2,
        "loss": {"klCoefficient": 0.05},
    },
    "rollout": {"batching": "perGroup"},
    "checkpoint": {"everySteps": 1},
}
# With a large eps a gradient that is zero up to rounding moves no weight: weights of two backends can be compared.
ACTOR = {"optimizer": {"learningRate": 1.0e-3, "valueLearningRate": 1.0e-2, "eps": 1.0e-4}}
BESIDE = COMMON | {"checkpoint": {"everySteps": 1, "asynchronous": True}}
OFFLOAD = {"offload": {"params": True, "grads": True, "optimizer": True}}
SAVING = {
    "fsdp2": OFFLOAD,
    "fsdp1": {"backend": "fsdp1", **OFFLOAD},
    "megatron": {"backend": "megatron", "processesPerPod": 2, "parallel": {"tensor": 2, "sequence": True}, **OFFLOAD},
}


def trained(run) -> list[dict[str, float]]:
    """Return the numbers of training, by step."""
    return [
        {name: value for name, value in line.items() if name.startswith("train/")}
        for line in run.lines("metrics.jsonl")
    ]


def exported(run) -> dict[str, torch.Tensor]:
    """Return the tensors of the run's model."""
    return dict(load_file(run.output / "model/model.safetensors"))


def checkpoint(run, step: int) -> Path:
    """Return the folder of the checkpoint of `step`, all of whose files are as its manifest says."""
    folder = run.output / f"checkpoints/step-{step:08d}"
    read_manifest(folder).verify(folder)
    return folder


def trained_files(folder: Path) -> dict:
    """Return what the manifest knows of weights, moments and counters."""
    files = read_manifest(folder).files.items()
    return {name: known for name, known in files if name.startswith(("model/", "optimizer/", "actor.json"))}


def assert_saved_alike(ours: Path, theirs: Path) -> None:
    """Compare the weights of two checkpoints; the second is of one rank."""
    (whole,) = theirs.glob("model/*.safetensors")
    expected = load_file(whole)
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
    read_shards(ours / "model", {name: [(one, (0,) * one.dim(), tuple(one.shape))] for name, one in found.items()})
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5, msg=f"{ours} {name}")


def test_runs_of_all_backends_that_offload_train_what_one_does_that_never_does(start):
    plain = start(folder="plain", actor=ACTOR, **COMMON)
    saving = {name: start(folder=name, actor=ACTOR | changes, **BESIDE) for name, changes in SAVING.items()}
    for run in (plain, *saving.values()):
        assert run.run() == 0, run.text + run.logs()
    assert "offload/bytes" not in plain.lines("metrics.jsonl")[-1]
    expected, weights = trained(plain)[1:], exported(plain)
    assert len(expected) == 2
    for name, run in saving.items():
        moved = run.lines("metrics.jsonl")[-1]
        assert moved["offload/bytes"] > 0 and moved["onload/bytes"] > 0, name
        for ours, theirs in zip(trained(run)[1:], expected, strict=True):
            for metric in ("train/grad_norm", "train/value_loss", "train/policy_loss"):
                assert ours[metric] == pytest.approx(theirs[metric], rel=1e-4, abs=1e-6), (name, metric)
        found = exported(run)
        assert found.keys() == weights.keys()
        for tensor, values in weights.items():
            torch.testing.assert_close(found[tensor], values, atol=1e-5, rtol=1e-5, msg=f"{name} {tensor}")
        for step in (1, 2):  # the first is saved while the second step trains
            assert_saved_alike(checkpoint(run, step), checkpoint(plain, step))
    with pytest.raises(AssertionError):
        assert_saved_alike(checkpoint(plain, 1), checkpoint(plain, 2))
    for step in (1, 2):
        assert trained_files(checkpoint(saving["fsdp2"], step)) == trained_files(checkpoint(plain, step))
    assert trained(saving["fsdp2"]) == trained(plain), "to the bit"
    assert all(torch.equal(tensor, weights[name]) for name, tensor in exported(saving["fsdp2"]).items())
