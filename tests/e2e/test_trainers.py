"""Backends and offloading in whole runs: with one engine batch per group nothing of a result depends on either."""

from dataclasses import asdict
from pathlib import Path

import pytest

from rl_core.checkpoint.manifest import read_manifest


def trained(run) -> list[dict[str, float]]:
    """Return the numbers of training, by step."""
    return [
        {name: value for name, value in line.items() if name.startswith("train/")}
        for line in run.lines("metrics.jsonl")
    ]


def files_of(checkpoint: Path) -> dict[str, dict]:
    """Return size and digest of the tensors' files, which are as the manifest says."""
    manifest = read_manifest(checkpoint)
    manifest.verify(checkpoint)
    return {name: asdict(entry) for name, entry in manifest.files.items() if name.endswith(".safetensors")}


def test_a_run_that_offloads_or_has_another_kind_of_fsdp_trains_the_same(start):
    common = {
        "algorithm": {"steps": 3, "optimizerStepsPerBatch": 2, "loss": {"klCoefficient": 0.05}},
        "rollout": {"batching": "perGroup"},
    }
    optimizer = {"learningRate": 1.0e-3}
    offload = {"params": True, "grads": True, "optimizer": True}
    plain = start(folder="plain", checkpoint={"everySteps": 2}, **common)
    beside = {"everySteps": 2, "asynchronous": True}
    saving = start(folder="saving", actor={"optimizer": optimizer, "offload": offload}, checkpoint=beside, **common)
    cut = {"optimizer": optimizer, "offload": offload, "backend": "fsdp1", "processesPerPod": 2}
    other = start(folder="fsdp1", actor=cut, checkpoint=beside, **common)
    for run in (plain, saving, other):
        assert run.run() == 0, run.text + run.logs()
    assert trained(saving) == trained(plain)
    digests = [files_of(run.output / "checkpoints/step-00000002") for run in (plain, saving)]
    assert digests[0] == digests[1], "written while training went on"
    assert len(files_of(other.output / "checkpoints/step-00000002")) >= 4
    exported = [(run.output / "model/model.safetensors").read_bytes() for run in (plain, saving)]
    assert exported[0] == exported[1]
    moved = saving.lines("metrics.jsonl")[-1]
    assert (
        moved["offload/bytes"] > 0
        and moved["onload/bytes"] > 0
        and "offload/bytes" not in plain.lines("metrics.jsonl")[-1]
    )
    norms = [[line["train/grad_norm"] for line in trained(run)[1:3]] for run in (other, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
