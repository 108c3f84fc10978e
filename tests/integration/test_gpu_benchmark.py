"""`benchmarks/gpu.py` runs on a CPU through the code that it runs on a GPU, and a part that fails costs the others nothing."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
PARTS = ("group", "attention", "generation", "hand_over", "tensors", "model", "fsdp2", "megatron", "sglang", "adapters")


def test_parts_show_their_figures_and_one_that_has_no_time_says_so(tmp_path):
    figures = tmp_path / "gpu.json"
    command = [
        sys.executable,
        str(SCRIPT),
        "--device",
        "cpu",
        "--small",
        "--only",
        ",".join(PARTS),
        "--output",
        figures,
    ]
    # A busy machine gets twice the time for training. The part of SGLang has none.
    budgets = [part for name in ("fsdp2=150", "megatron=150", "sglang=0") for part in ("--budget", name)]
    done = subprocess.run([*command, *budgets], capture_output=True, text=True, timeout=600)
    lines = {name: part for line in done.stdout.splitlines() for name, part in json.loads(line).items()}
    assert list(lines) == list(PARTS) and lines == json.loads(figures.read_text()), done.stderr
    assert done.returncode == 1 and "no time was left" in lines.pop("sglang")["error"]
    assert not [part["error"] for part in lines.values() if "error" in part]
    assert lines["group"]["aborted_group_refuses"] and lines["generation"]["parity"]["equal_tokens"] == 1.0
    assert all(lines["attention"][kind]["within_bf16"] for kind in ("causal", "window"))
    assert {way: lines["hand_over"][way]["bit_equal"] for way in ("zmq", "ipc")} == {"zmq": True, "ipc": True}
    sync = lines["adapters"]["hf"]
    assert sync["sent_alone"] and sync["sent_whole"] and 0 < sync["adapters_over_whole_bytes"] < 0.2
    assert sync["adapters"]["sync_seconds"] > 0
    sent = {way: lines["tensors"][way]["sent_so_far"] for way in ("ipc", "group", "host")}
    assert sent == {"ipc": {"ipc": 6}, "group": {"ipc": 6, "gloo": 6}, "host": {"ipc": 6, "gloo": 6, "host": 6}}
    assert all(lines["tensors"][way]["bit_equal"] for way in (*sent, "broadcast"))
    assert lines["tensors"]["broadcast"]["receivers"] == 2
    for backend in ("fsdp2", "megatron"):
        found = lines[backend]
        assert found["tokens_per_second"] > 0 and found["parameters"] == lines["model"]["parameters"]
        assert found["offload"]["left_bytes"] == 0 and found["offload"]["bytes"] > 0
