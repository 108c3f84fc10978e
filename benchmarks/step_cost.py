"""What a step costs besides its compute: `rljob run` of a model that computes nothing, with 1 and 2 rollouts. Prints JSON.

`fixed_ms` is the median step less its compute: forward, backward and optimizer as the trainer measured them in the same run, and the
same generation by the engine alone in this process. `per_message_ms` divides it by the messages that wait for each other in a step
(MESSAGES); `limit_ms` is the time that raw pyzmq takes for as many messages between two processes of this machine. The peer of a step
at a real size is in trl_side_by_side.py.

    python benchmarks/step_cost.py [--steps N] [--rollouts 1 2] [--against COMMAND]

`--against` names the `rljob` of another checkout: its runs and ours take turns on the machine, and `ratio` is ours over theirs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _letters
import trl_side_by_side as side_by_side
from _processes import RLJOB

SIZE = "nothing"
MESSAGES = (
    "lease_groups: its answer brings the prompts",
    "step_rows: rows to the environment, and its answer",
    "trajectories: the record to the channel, and its answer",
    "finish: the entry to the runner",
    "move: the key to the channel, and the record on to the data rank",
    "recv_batch: its answer",
    "run_training: the call, and its answer",
    "sync_model_to_rollout: the call, and its answer",
    "weights_offer: the offer, and APPLIED",
    "weights_commit: the commit, and ACK",
)
NUM_MESSAGES = 17
ECHO = """
import sys, zmq
socket = zmq.Context().socket(zmq.ROUTER)
print(socket.bind_to_random_port("tcp://127.0.0.1"), flush=True)
while True:
    socket.send_multipart(socket.recv_multipart())
"""


def generation_ms() -> float:
    """Return the milliseconds that the engine alone takes for a step's rows."""
    import torch
    from transformers import AutoModelForCausalLM

    from rl_core.data.tokenizer import Tokenizer, read_files
    from rl_core.rollouts.hf.engine import HFEngine
    from rl_core.rollouts.sampling import SamplingParams

    torch.set_num_threads(1)
    size = _letters.SIZES[SIZE]
    with tempfile.TemporaryDirectory() as folder:
        _letters.make_task(Path(folder), 0, size)
        model = AutoModelForCausalLM.from_pretrained(Path(folder) / "model").eval()
        tokenizer = Tokenizer.from_files(read_files(Path(folder) / "model"))
        length = _letters.PROMPT_LENGTH + size.max_new_tokens + 1
        engine = HFEngine(model, tokenizer, max_batch=size.rows, max_seq_len=length)
        params = SamplingParams(max_new_tokens=size.max_new_tokens)
        seconds = []
        for _ in range(200):
            started = time.perf_counter()
            for row in range(size.rows):
                engine.submit(list(range(3, 3 + _letters.PROMPT_LENGTH)), params, row)
            while engine.busy:
                engine.step()
            seconds.append(time.perf_counter() - started)
    return side_by_side.milliseconds(seconds)


def round_trip_ms() -> float:
    """Return the milliseconds of one 1 KB message to another process and back by raw pyzmq."""
    import zmq

    with subprocess.Popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True) as echo:
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{echo.stdout.readline().strip()}")
        seconds = []
        for _ in range(1000):
            started = time.perf_counter()
            dealer.send(b"x" * 1024)
            dealer.recv()
            seconds.append(time.perf_counter() - started)
        dealer.close(linger=0)
        echo.terminate()
    return round(1e3 * statistics.median(seconds), 3)


def figures(side: side_by_side.Side, generation: float, round_trip: float) -> dict:
    """Return the figures of one run."""
    found = side_by_side.summary(side)
    compute = generation + found["log_probs_and_backward_ms"] + found["optimizer_ms"]
    fixed = found["step_ms"] - compute
    return {
        "step_ms": found["step_ms"],
        "compute_ms": round(compute, 2),
        "fixed_ms": round(fixed, 2),
        "per_message_ms": round(fixed / NUM_MESSAGES, 3),
        "limit_ms": round(NUM_MESSAGES / 2 * round_trip, 2),
        "parts_ms": {name: found[f"{name}_ms"] for name in side_by_side.OUR_PARTS},
        "steps": len(found["seconds"]),
    }


def main() -> None:
    """Run the sides in turns and print what they came to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--against", help="the rljob command of another checkout")
    options = parser.parse_args()
    generation, round_trip = generation_ms(), round_trip_ms()
    report = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "messages": MESSAGES}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _letters.make_task(folder, 0, _letters.SIZES[SIZE])
        for rollouts in options.rollouts:
            commands = {"this": RLJOB} | ({"other": options.against} if options.against else {})
            sides = {
                name: side_by_side.ours(folder, 0, options.steps, rollouts, SIZE, rljob=command, name=f"{name}-")
                for name, command in commands.items()
            }
            side_by_side.interleave(list(sides.values()), side_by_side.SLICE_SECONDS[SIZE])
            found = {name: figures(side, generation, round_trip) for name, side in sides.items()}
            if options.against:
                found["ratio"] = round(found["this"]["fixed_ms"] / found["other"]["fixed_ms"], 3)
            report[f"rollouts_{rollouts}"] = found
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
