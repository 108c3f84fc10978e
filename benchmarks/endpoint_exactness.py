"""Tokens of random agent sessions that differ from those that the policy read and sampled, over five chat templates. Prints JSON.

Sessions are those of tests/unit/endpoint: tools, thinking, system prompts, unusual whitespace, retries, summaries and edited histories. A
sampled token is exact if it, its log-probability and its version are those of a call of the policy, whose input is exactly what stands
before the token in its sample. Reach: 0 differing tokens in 10,000 sessions. `python benchmarks/endpoint_exactness.py --sessions 10000`.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))


NAMES = ("sessions", "calls", "tokens", "differing", "trained_not_once", "branches", "unspliced")


def differing(session: Any, calls: list[Any]) -> int:
    """Return the sampled tokens of a session that no call of the policy accounts for; each call accounts for one turn."""
    made = Counter((tuple(prompt), tuple(ids), tuple(logs), tuple(versions)) for prompt, ids, logs, versions in calls)
    wrong = 0
    for turn in session.turns:
        output = turn.output
        ids = turn.ids
        before = tuple(ids[: len(ids) - len(output.ids)])
        call = (before, tuple(output.ids), tuple(output.logprobs), tuple(output.versions))
        if made[call]:
            made[call] -= 1
        else:
            wrong += len(output.ids)
    return wrong + sum(len(ids) * count for (_, ids, _, _), count in made.items())


async def measure(name: str, sessions: int) -> Counter[str]:
    from tests.unit.endpoint.conftest import TEMPLATES, SampledText, make_episodes, make_tokenizer
    from tests.unit.endpoint.test_sessions import TEXTS, converse

    tokenizer = make_tokenizer(TEMPLATES[name])
    episodes = make_episodes(tokenizer)
    counts: Counter[str] = Counter()
    for seed in range(sessions):
        policy = SampledText(tokenizer, TEXTS, seed=seed)
        episode = episodes.open("s", policy, seed=seed, greedy=False)
        await converse(random.Random(seed), episode, tokenizer)
        episodes.close(episode)
        session = episode.session
        trained = [
            turn
            for branch in session.branch_samples()
            for turn, one in zip(branch.turns, branch.trains, strict=True)
            if one
        ]
        counts["sessions"] += 1
        counts["calls"] += len(policy.calls)
        counts["tokens"] += sum(len(call[1]) for call in policy.calls)
        counts["differing"] += differing(session, policy.calls)
        counts["trained_not_once"] += len(trained) != len({id(turn) for turn in trained}) or len(trained) != len(
            session.turns
        )
        counts["branches"] += session.branches
        counts["unspliced"] += session.unspliced
    return counts


def main() -> int:
    from tests.unit.endpoint.conftest import TEMPLATES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=10_000, help="sessions over all templates")
    each = -(-parser.parse_args().sessions // len(TEMPLATES))
    began = time.perf_counter()
    rows = {name: asyncio.run(measure(name, each)) for name in TEMPLATES}
    total = sum(rows.values(), Counter[str]())
    wrong = total["differing"] + total["trained_not_once"]
    figures = {name: dict(row) for name, row in rows.items()}
    print(
        json.dumps(
            {
                **{name: total[name] for name in NAMES},
                "templates": figures,
                "seconds": time.perf_counter() - began,
            },
            indent=1,
        )
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
