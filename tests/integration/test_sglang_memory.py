"""What an engine on a shared device gives up for the trainer, by SGLang's names of it. What is freed needs a GPU."""

import json
import subprocess
import sys


def test_the_buffers_of_cuda_graphs_are_away_as_long_as_the_kv_cache_is():
    child = [sys.executable, "-m", "tests.integration.sglang_memory_child"]
    done = subprocess.run(child, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    everything, *steps = json.loads(done.stdout.splitlines()[-1])
    assert steps == [[everything, False], [["cuda_graph", "kv_cache"], False], [[], True]]
