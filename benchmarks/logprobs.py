"""Log-probability and entropy of tokens over a large vocabulary, chunked beside the usual way, forwards and backwards. Prints JSON.

Hidden states [1, T, H] of which all tokens train, and the output weight [V, H]. `chunked` is `hidden_scores`: the logits of a chunk of
tokens exist at a time and are made again backwards. `naive` makes all logits, their log_softmax, gathers and sums up the entropy, as a
plain training loop does. Both give gradients of hidden states and weight. `limit_ms` is their matrix products alone: those of the naive
way are 6 T V H operations; the chunked way makes the logits again, 8 T V H. Peaks are what a process of its own adds to what it held before
(weights and hidden states among it); on a GPU the allocator tells. The sides take turns, one thread, medians.

    python benchmarks/logprobs.py [--tokens 2048] [--hidden 256] [--vocabulary 150000] [--repetitions 3]
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from rl_core.algorithms.logprobs import hidden_scores

TARGETS = {"peak": 0.25, "time": 1.1}


def naive(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    logits = (hidden @ weight.T)[:, :-1].float()
    log_probs = logits.log_softmax(-1)
    chosen = log_probs.gather(-1, ids[:, 1:, None])[..., 0]
    return chosen, -(log_probs.exp() * log_probs).sum(-1)


def chunked(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    scores = hidden_scores(hidden, weight, ids, entropy=True)
    assert scores.entropy is not None
    return scores.log_probs[:, 1:], scores.entropy[:, 1:]


WAYS = {"chunked": chunked, "naive": naive}


class Layer:
    """Inputs, and one pass of one way over them."""

    def __init__(self, options: argparse.Namespace) -> None:
        generator = torch.Generator().manual_seed(0)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32

        def made(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.device, self.dtype).requires_grad_()

        self.hidden = made(1, options.tokens, options.hidden)
        self.weight = made(options.vocabulary, options.hidden)
        self.ids = torch.randint(0, options.vocabulary, (1, options.tokens), generator=generator).to(self.device)

    def run(self, way: str) -> Tensor:
        log_probs, entropies = WAYS[way](self.hidden, self.weight, self.ids)
        (log_probs.mean() - 0.01 * entropies.mean()).backward()
        gradient = self.hidden.grad
        assert gradient is not None
        self.hidden.grad = self.weight.grad = None
        return gradient

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def products(self) -> None:
        """The matrix products of the naive way, a chunk of tokens at a time so that no memory is touched first."""
        with torch.no_grad():
            for rows in self.hidden[0].split(512):
                logits = rows @ self.weight.T
                logits @ self.weight
                logits.T @ rows


def seconds(layer: Layer, call: Callable[[], Any]) -> float:
    layer.synchronize()
    began = time.perf_counter()
    call()
    layer.synchronize()
    return time.perf_counter() - began


def peak(layer: Layer, way: str) -> int:
    """Return the bytes that one pass adds; of a process that has made no other."""
    if layer.device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        layer.run(way)
        return torch.cuda.max_memory_allocated() - before
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    layer.run(way)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in (("tokens", 2048), ("hidden", 256), ("vocabulary", 150_000), ("repetitions", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--peak-of", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak_of:
        print(peak(Layer(options), options.peak_of))
        return
    command = [sys.executable, *sys.argv, "--peak-of"]
    peaks = {way: int(subprocess.run([*command, way], check=True, capture_output=True).stdout) for way in WAYS}
    layer = Layer(options)
    ours, theirs = (layer.run(way) for way in WAYS)
    differ = (ours - theirs).abs().max() / theirs.abs().max()
    taken: dict[str, list[float]] = {name: [] for name in (*WAYS, "products")}
    for _ in range(options.repetitions):
        for way in WAYS:
            taken[way].append(seconds(layer, lambda way=way: layer.run(way)))
        taken["products"].append(seconds(layer, layer.products))
    medians = {name: statistics.median(values) for name, values in taken.items()}
    report = {
        "torch": torch.__version__,
        "device": layer.device,
        "tokens": options.tokens,
        "hidden": options.hidden,
        "vocabulary": options.vocabulary,
        "load": os.getloadavg()[0],
        "ms": {way: round(medians[way] * 1e3) for way in WAYS},
        "limit_ms": {"naive": round(medians["products"] * 1e3), "chunked": round(medians["products"] * 1e3 * 8 / 6)},
        "peak_mb": {way: round(size / 2**20) for way, size in peaks.items()},
        "gradients_differ_by": float(differ),
        "peak": round(peaks["chunked"] / peaks["naive"], 3),
        "time": round(medians["chunked"] / medians["naive"], 3),
        "targets": TARGETS,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
