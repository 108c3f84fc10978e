"""Weight sync beside memcpy and raw pyzmq: a model to receivers in processes of their own. Prints JSON.

    OMP_NUM_THREADS=1 python benchmarks/weight_sync.py [--megabytes 200] [--receivers 2] [--runs 9] [--only PART]

"publish" is the whole call (copy to host memory, handshake, transfer, verification, last ACK); "sync" is OFFER to last ACK,
"pause" is how long the slowest receiver served nothing. GB/s count the model's bytes once,
however many receivers. The peers, in turns with ours so that a busy machine slows them alike: memcpy of the same bytes in
one thread, and in as many processes at once as there are receivers (what their memory allows); raw pyzmq with 1 MiB
messages, 16 in flight per receiver, to the same number of processes, which drop them ("plain"), or hash and copy them as
we must ("tagged"). Medians.

`--only` prints one part:
full    all ways; each after the other, so that 2 GB (`--megabytes 2000 --receivers 1 --runs 5`) need 12 GB of memory.
patch   the model in bfloat16, 0.1, 1 and 3 % of its elements changed at random in all tensors, beside full weights in turns: times over
        those of full weights, bytes, and whether the receivers hold the same bits.
pause   3.2 MB to 1 and to 8 receivers of this host in turns, and what their copies alone take.
fanout  20 MB by stream to 8 receivers, from the publisher alone and through trees (`weights.fanout`).
small   77,000 parameters in 21 tensors, one receiver, syncs 30 ms apart as between training steps, beside as many raw pyzmq round trips of
        a manifest's size as the protocol has (OFFER and COMMIT); and 4 MB.
sglang  the real SGLang engine (on a CPU) loads a model of about the size, by each way: the pause over one memcpy of it (only if asked for).
proofs  `--runs` syncs in bfloat16 to the HF engine and to SGLang: how many their proofs or the content check refuse. Only when named.
"""

import argparse
import json
import os
import statistics
import time
from collections import defaultdict

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import zmq
from _proofs import judge_syncs
from _weight_world import Case, Other, RawStar, shapes_of, summary, trust_all

TINY_BYTES, PAUSE_BYTES, FANOUT_BYTES = 4_000_000, 3_200_000, 20_000_000
MANY = 8
SMALL_LAYER = {
    **{f"attention.{name}": [64, 64] for name in "qkvo"},
    "gate": [96, 64],
    "up": [96, 64],
    "down": [64, 96],
    "norm1": [64],
    "norm2": [64],
}
SMALL_SHAPES = {
    "embed": [50, 64],
    **{f"layer{index}.{name}": shape for index in range(2) for name, shape in SMALL_LAYER.items()},
    "norm": [64],
    "head": [50, 64],
}
PARTS = ("full", "patch", "pause", "fanout", "small")
PATCH_SHARES = (0.001, 0.01, 0.03)
ROUND_TRIPS = 2
ENGINE_LAYER = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 16}
ENGINE_LAYER_BYTES = 51_400_000
MANIFEST_BYTES = 900


def copies_without_checksums(case):
    """Run a sync of `case` whose publisher takes no checksums either."""
    from rl_core.weights import checksums

    own = (checksums.sum_bytes, checksums.copy_bytes, checksums.add)
    trust_all(None, checksums)
    case.run()
    checksums.sum_bytes, checksums.copy_bytes, checksums.add = own


def in_turns(case, runs, peers, warm=2, run=Case.run):
    """Return (summary of the syncs, medians of the seconds of `peers`)."""
    seconds = defaultdict(list)
    for _ in range(runs + warm):
        run(case)
        for name, peer in peers.items():
            seconds[name].append(peer())
    case.close()
    return summary(case.reports, warm), {name: statistics.median(all_[warm:]) for name, all_ in seconds.items()}


def measure(nbytes, receivers, runs):
    """Full weights by each way; the trained weights are one buffer, which the peers send too."""
    import torch

    flat = torch.randint(-(2**31), 2**31 - 1, (nbytes // 4,), dtype=torch.int32).view(torch.float32)
    data, shapes = flat.view(torch.uint8).numpy(), shapes_of(nbytes)
    sizes = [shape[0] for shape in shapes.values()]
    state = dict(zip(shapes, flat[: sum(sizes)].split(sizes), strict=True))
    raw = RawStar(data, receivers)

    target = np.zeros_like(data)

    def memcpy():
        began = time.perf_counter()
        np.copyto(target, data)
        return time.perf_counter() - began

    copies = {"memcpy": memcpy, "memcpy in all receivers at once": raw.memcpy}
    streams = {f"raw pyzmq, {mode}": lambda mode=mode: raw.push(mode) for mode in ("plain", "tagged")}
    result, seconds = {}, {}
    for name, peers, run, options in (
        ("shared memory", copies, Case.run, {}),
        ("shared memory, engine copies", {}, Case.run, {"in_place": False}),
        ("shared memory, no checksums", {}, copies_without_checksums, {"checksums": False}),
        ("stream", streams, Case.run, {"host_token": "another host"}),
        ("gloo", {}, Case.run, {"weights": {"transport": "gloo"}}),
    ):
        case = Case(shapes, receivers, state=state, **options)
        result[name], found = in_turns(case, runs, peers, run=run)
        seconds |= found
    for other in raw.others:
        other.close()
    speeds = {name: nbytes / taken / 1e9 for name, taken in seconds.items()}
    result |= {f"{name}, GBps": speed for name, speed in speeds.items()}
    result["ratios"] = {
        "shared memory apply / memcpy in all receivers at once": nbytes
        / result["shared memory"]["apply_ms"]
        / 1e6
        / speeds["memcpy in all receivers at once"],
        "shared memory publish / memcpy": result["shared memory"]["publish_GBps"] / speeds["memcpy"],
        "shared memory sync / memcpy": result["shared memory"]["sync_GBps"] / speeds["memcpy"],
        "shared memory sync without checksums / memcpy": result["shared memory, no checksums"]["sync_GBps"]
        / speeds["memcpy"],
        "stream sync / raw pyzmq, plain": result["stream"]["sync_GBps"] / speeds["raw pyzmq, plain"],
        "stream sync / raw pyzmq, tagged": result["stream"]["sync_GBps"] / speeds["raw pyzmq, tagged"],
    }
    return result


def measure_pause(runs):
    """How long generation stands still with 1 and with 8 receivers, and how long their copies alone take, all at once."""
    shapes = shapes_of(PAUSE_BYTES)
    cases = {number: Case(shapes, number) for number in (1, MANY)}
    raw = {number: RawStar(np.zeros(PAUSE_BYTES, np.uint8), number) for number in cases}
    copies, warm = {number: [] for number in cases}, 5
    for _ in range(runs + warm):
        for number, case in cases.items():
            case.run()
            copies[number].append(raw[number].memcpy())
    found = {
        number: {
            "pause_ms": summary(case.reports, warm)["pause_ms"],
            "copies_ms": 1e3 * statistics.median(copies[number][warm:]),
        }
        for number, case in cases.items()
    }
    for closing in (*cases.values(), *(other for star in raw.values() for other in star.others)):
        closing.close()
    beside = {number: one["pause_ms"] - one["copies_ms"] for number, one in found.items()}
    return {f"{number} receivers": one for number, one in found.items()} | {
        f"pause with {MANY} / with 1": found[MANY]["pause_ms"] / found[1]["pause_ms"],
        "the same beside the copies (<= 2)": beside[MANY] / beside[1],
    }


def measure_fanout(runs):
    """The same bytes by stream to 8 receivers: from the publisher alone, and from who has them."""
    result, others, warm = {}, None, 2
    for epoch, (name, fanout) in enumerate((("publisher alone", None), ("fanout 1", 1), ("fanout 2", 2))):
        options = {"host_token": "another host", "weights": {"fanout": fanout}, "epoch": epoch, "others": others}
        case = Case(shapes_of(FANOUT_BYTES), MANY, **options)
        for _ in range(runs + warm):
            case.run()
        relayed = statistics.median(len(one.relayed) for one in case.reports[warm:])
        result[name] = summary(case.reports, warm) | {"relayed": relayed, "bit-equal": case.equal()}
        case.publisher.close()
        others = case.others
    for other in others:
        other.close()
    return result


def measure_tiny(receivers, runs):
    """The latency that a step of half a second feels: 4 MB, 1 million parameters."""
    result = {}
    for name, token in (("shared memory", None), ("stream", "another host")):
        case = Case(shapes_of(TINY_BYTES), receivers, host_token=token, in_place=False)
        for _ in range(runs + 5):
            case.run()
        result[name] = summary(case.reports, 5)
        case.close()
    return result


def measure_small(runs):
    """What a sync costs where messages are all of it, and what its messages would cost in raw pyzmq."""
    case, router = Case(SMALL_SHAPES, 1), zmq.Context().socket(zmq.DEALER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    echo = Other("echo", address=f"tcp://127.0.0.1:{port}")
    raw, warm = [], 5
    for _ in range(runs + warm):
        time.sleep(0.03)
        case.run()
        time.sleep(0.03)
        began = time.perf_counter()
        for _ in range(ROUND_TRIPS):
            router.send(bytes(MANIFEST_BYTES))
            router.recv()
        raw.append(time.perf_counter() - began)
    trips = {f"raw pyzmq, {ROUND_TRIPS} round trips, ms": 1e3 * statistics.median(raw[warm:])}
    parameters = {"parameters": sum(tensor.numel() for tensor in case.state.values())}
    for closing in (case, echo):
        closing.close()
    return parameters | summary(case.reports, warm) | trips


def measure_sglang(nbytes, runs):
    """How long generation stands still while the processes of an SGLang engine load the model, beside one copy of it."""
    from rl_core.messages.weights import ReceiverAddress
    from rl_core.rollouts.sglang import SGLangWorker
    from rl_core.transports import tokens
    from tests.integration import rollout_world
    from tests.integration.weight_world import publisher
    from tests.weight_samples import StateSource

    rollout_world.CONFIG |= {**ENGINE_LAYER, "num_hidden_layers": max(1, round(nbytes / ENGINE_LAYER_BYTES))}
    world, warm = rollout_world.World(SGLangWorker, engine="sglang"), 2
    state = rollout_world.random_state(1)
    source = np.concatenate([tensor.view(-1).numpy() for tensor in state.values()])
    target, result = np.zeros_like(source), {"bytes": source.nbytes}
    try:
        world.start()
        receiver = ReceiverAddress(name="rollout:0", address=world.server.address, host_token=tokens.host_token())
        for way in ("shared", "ipc", "gloo", "stream"):
            reports, copies = [], []
            with publisher(way, bucketBytes=128 << 20) as sending:
                for version in range(1, runs + warm + 1):
                    state["model.norm.weight"][0] = version
                    reports.append(sending.publish(version, StateSource(state), [receiver], 1))
                    began = time.perf_counter()
                    np.copyto(target, source)
                    copies.append(time.perf_counter() - began)
            copy = statistics.median(copies[warm:])
            found = summary(reports, warm)
            result[way] = found | {"memcpy_ms": 1e3 * copy, "pause / memcpy": found["pause_ms"] / 1e3 / copy}
    finally:
        world.close()
    return result


def measure_patch(nbytes, runs):
    """What a patch costs over full weights, by the share of the elements that changed; one receiver, each way in turns."""
    shapes = {name: [2 * size for size in shape] for name, shape in shapes_of(nbytes).items()}
    result, warm = {}, 2
    for way, token in (("shared memory", None), ("stream", "another host")):
        options = {"host_token": token, "dtype": "bfloat16"}
        full = Case(shapes, 1, **options)
        patch = Case(shapes, 1, weights={"syncer": "patch"}, **options)
        for share in PATCH_SHARES:
            before = len(full.reports)
            for _ in range(runs + warm):
                for case in (full, patch):
                    case.change(share)
                    case.run()
            reports = {"full": full.reports[before + warm :], "patch": patch.reports[before + warm :]}
            middle = {
                (name, key): statistics.median(getattr(one, key) for one in reports[name])
                for name in reports
                for key in ("seconds", "copy_seconds", "sync_seconds", "apply_seconds", "pause_seconds", "bytes")
            }
            result[f"{way}, {100 * share:g} % changed"] = (
                {
                    f"{name} {key.removesuffix('_seconds')}": value * (1 if key == "bytes" else 1e3)
                    for (name, key), value in middle.items()
                }
                | {
                    f"patch over full, {key}": middle["patch", key] / middle["full", key]
                    for key in ("seconds", "sync_seconds", "bytes")
                }
                | {"bit-equal": patch.equal(), "patched": all(one.patched for one in reports["patch"])}
            )
        for case in (full, patch):
            case.close()
    return result


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def main():
    import platform

    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--receivers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--only", choices=[*PARTS, "sglang", "proofs"], help="print one part alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    nbytes, runs = arguments.megabytes * 10**6, arguments.runs
    parts = {
        "full": {
            f"{arguments.megabytes} MB, {number} receivers": lambda number=number: measure(nbytes, number, runs)
            for number in sorted({1, arguments.receivers})
        },
        "patch": {f"patch, {arguments.megabytes} MB, 1 receiver, ms": lambda: measure_patch(nbytes, runs)},
        "pause": {f"pause, {PAUSE_BYTES / 1e6} MB": lambda: measure_pause(max(runs, 30))},
        "fanout": {f"fanout, {FANOUT_BYTES / 1e6} MB, {MANY} receivers": lambda: measure_fanout(runs)},
        "small": {
            "4 MB": lambda: measure_tiny(arguments.receivers, 40),
            "77k parameters, 1 receiver": lambda: measure_small(100),
        },
        "sglang": {f"SGLang, {arguments.megabytes} MB": lambda: measure_sglang(nbytes, runs)},
        "proofs": {
            f"{runs} syncs in bfloat16, {engine}": lambda engine=engine: judge_syncs(engine, runs)
            for engine in ("hf", "sglang")
        },
    }
    result = {
        "machine": {"cores": os.cpu_count(), "load": os.getloadavg(), "python": platform.python_version()},
        "versions": {"torch": torch.__version__, "pyzmq": zmq.pyzmq_version(), "libzmq": zmq.zmq_version()},
        "runs": runs,
    }
    for part in [arguments.only] if arguments.only else PARTS:
        result |= {name: take() for name, take in parts[part].items()}
    result["machine"]["load_at_end"] = os.getloadavg()
    print(json.dumps(rounded(result), indent=2))


if __name__ == "__main__":
    main()
