"""The page over a run of 1,000 steps and 100,000 samples: first view, clicks to a step and to a sample, a search; and what keeping samples costs.

    python benchmarks/view.py [--steps N] [--samples N]

First view: from the start of the server to the last answer that the page needs before it has drawn all.
With Chromium on the PATH the page is loaded too, browser start included. Prints JSON. Targets: first view < 1 s, a click < 0.3 s, a search < 1 s.
"""

import argparse
import http.client
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from rl_core.api.records import Completion, PromptGroupRecord
from rl_core.batching.samples import keep_sample
from rl_core.messages.samples import GIVEN, TRAINED, KeptSample
from rl_core.samples.lines import TRAIN, sample_line
from rl_core.samples.writer import SampleWriter
from rl_core.view.server import ViewServer

METRICS, GROUP, PROMPT, RESPONSE = 145, 10, 40, 160
CURVES = "&".join(f"name=metric{number}/mean" for number in range(10))


def make_sample(
    group: str, index: int, rng: np.random.Generator, prompt: int = PROMPT, response: int = RESPONSE
) -> KeptSample:
    """Return a completion of `prompt` + `response` tokens."""
    length = prompt + response
    mask = np.array([GIVEN] * prompt + [TRAINED] * response, np.uint8)
    log_probs = np.where(mask == GIVEN, np.nan, rng.normal(-1, 0.5, length)).astype(np.float32)
    return KeptSample(
        group_id=group,
        index=index,
        prompt_index=index,
        info={"ground_truth": "42"},
        messages=(
            ("user", "What is it? " * (prompt // 3), prompt),
            ("assistant", "It is 42. " * (response // 3), response),
        ),
        prompt_messages=1,
        reward=float(rng.integers(0, 2)),
        parts={"format": 1.0},
        reason="stop",
        versions=(1, 1),
        token_ids=rng.integers(0, 150_000, length).astype(np.int32),
        mask=mask,
        engine=log_probs,
        token_versions=np.where(mask == GIVEN, -1, 1).astype(np.int32),
        row=index,
        shaped_reward=1.0,
        advantages=log_probs,
    )


def make_run(folder: Path, steps: int, samples: int) -> None:
    """Write metrics and samples."""
    rng = np.random.default_rng(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            values = {f"metric{number}/mean": float(value) for number, value in enumerate(rng.normal(size=METRICS))}
            file.write(json.dumps({"step": step, "epoch": 0, "time/step": 30.0, **values}) + "\n")
    (folder / "status.json").write_text(json.dumps({"phase": "Finished", "step": steps, "totalSteps": steps}))
    per_step = samples // steps
    kept = [make_sample("", index, rng) for index in range(per_step)]
    pieces, writer = [" token"] * (PROMPT + RESPONSE), SampleWriter(folder / "samples", limit=10**10)
    for step in range(1, steps + 1):
        named = [_renamed(sample, f"0-{step}-{index // GROUP}", index % GROUP) for index, sample in enumerate(kept)]
        lines = [
            sample_line(one, split=TRAIN, step=step, epoch=0, version=step, trainer=one.engine, pieces=pieces, wall=1.0)
            for one in named
        ]
        writer.write(lines, name=f"e0000-s{step:07d}")
    writer.close()


def cost_ms(prompt: int, response: int) -> dict[str, float]:
    """Return the processor time, ms, that a step of the default 4 groups of 8 samples costs the data rank and the runner."""
    rng, rows = np.random.default_rng(0), 32
    kept = [make_sample("0-1", index, rng, prompt, response) for index in range(rows)]
    pieces = [" token"] * (prompt + response)
    messages = [
        {"role": "user", "content": "What is it? ", "token_ids": kept[0].token_ids[:prompt]},
        {
            "role": "assistant",
            "content": "It is 42. ",
            "token_ids": kept[0].token_ids[prompt:],
            "generation_logprobs": kept[0].engine[prompt:],
        },
    ]
    record = PromptGroupRecord(
        prompt_idx=0,
        prompt=messages[:1],
        extra_env_info={"ground_truth": "42"},
        metadata={},
        completions=[Completion(message_log=messages, reward=1.0) for _ in range(rows)],
    )

    def write(one: KeptSample) -> None:
        sample_line(one, split=TRAIN, step=1, epoch=0, version=0, trainer=one.engine, pieces=pieces, wall=1.0)

    works = {
        "data_rank": lambda: [keep_sample(record, index, group_id="0-1") for index in range(rows)],
        "runner": lambda: [write(one) for one in kept],
    }
    return {name: min(_processor_ms(work) for _ in range(5)) for name, work in works.items()}


def _processor_ms(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return round(1e3 * (time.process_time() - began), 2)


def _renamed(sample: KeptSample, group: str, index: int) -> KeptSample:
    return replace(sample, group_id=group, index=index)


def ask(port: int, path: str) -> tuple[float, bytes]:
    """Return the seconds of a request and its answer."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", path)
    body = connection.getresponse().read()
    return time.perf_counter() - began, body


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=100_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_run(folder, options.steps, options.samples)
        size = sum(path.stat().st_size for path in (folder / "samples").iterdir())
        began, worked = time.perf_counter(), time.process_time()
        server = ViewServer([folder])
        paths = [
            "/", "/app.js", "/view.css", "/api/runs", f"/api/curves?run=0&{CURVES}", "/api/steps?run=0",
            f"/api/samples?run=0&step={options.steps}",
        ]  # fmt: skip
        parts = {path.partition("?")[0]: round(ask(server.port, path)[0], 4) for path in paths}
        first_view, processor = time.perf_counter() - began, time.process_time() - worked
        middle = options.steps // 2
        to_step = min(ask(server.port, f"/api/samples?run=0&step={middle}")[0] for _ in range(5))
        to_sample = min(
            ask(server.port, f"/api/sample?run=0&step={middle}&group=0-{middle}-1&sample=3")[0] for _ in range(5)
        )
        to_text = min(ask(server.port, "/api/samples?run=0&text=nowhere")[0] for _ in range(3))
        chromium_s = load(server.url, folder) if shutil.which("chromium") else None
        server.close()
    result = {
        "steps": options.steps,
        "samples": options.samples,
        "megabytes": round(size / 1e6),
        "first_view_s": round(first_view, 3),
        "first_view_processor_s": round(processor, 3),
        "first_view_parts_s": parts,
        "click_to_step_s": round(to_step, 4),
        "click_to_sample_s": round(to_sample, 4),
        "search_text_s": round(to_text, 3),
        "chromium_start_and_load_s": chromium_s,
        "cost_of_a_step_ms": {f"{sum(size)} tokens": cost_ms(*size) for size in ((6, 3), (40, 160), (200, 1000))},
    }
    print(json.dumps(result, indent=1))


def load(url: str, folder: Path) -> float:
    """Return the seconds from the start of Chromium until the page is drawn."""
    began = time.perf_counter()
    command = [
        "chromium", "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--timeout=20000",
        "--dump-dom", url,
    ]  # fmt: skip
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    return round(time.perf_counter() - began, 2)


if __name__ == "__main__":
    main()
