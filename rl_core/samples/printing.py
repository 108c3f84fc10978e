"""Kept samples as text for a terminal. Samples are hostile input: nothing that a terminal would act on is printed as it is."""

import json
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from rl_core.api.records import FinishReason
from rl_core.samples.lines import FILTERED, TRAIN

REASONS: Mapping[str, str] = {
    FinishReason.ERROR: "the sample failed; it was not trained",
    FinishReason.LENGTH: "the completion was cut at rollout.sampling.maxNewTokens",
    FinishReason.SEQ_LIMIT: "prompt and completions reached rollout.maxSequenceLength",
    FinishReason.TERMINATED: "the environment ended the episode",
    FinishReason.MAX_TURNS: "the episode reached env.maxTurns",
    FILTERED: "dynamic sampling discarded the group; it was not trained",
    FinishReason.STOP: "the model ended its completion; the environment did not end the episode",
}
"""Why a sample ended, in words."""
KEPT_CONTROLS = frozenset("\n\t")
DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c")
"""Characters that change the direction of text after them, across the lines that we print."""


def printable(text: str) -> str:
    """Return `text` with control characters, direction marks and lone surrogates as escapes (\\x1b, \\u202e); \\r\\n becomes \\n."""
    return "".join(map(_printable, text.replace("\r\n", "\n")))


def _printable(character: str) -> str:
    if character in KEPT_CONTROLS or (character.isascii() and character.isprintable()):
        return character
    kind = unicodedata.category(character)
    if kind in ("Cc", "Cs", "Zl", "Zp") or character in DIRECTIONS:
        code = ord(character)
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    return character


def explain_reasons(reasons: Iterable[str]) -> str:
    """Return one line with the meaning of each of `reasons`, without repetitions. Reasons that this version does not know are left out."""
    return "".join(f"{reason}: {REASONS[reason]}\n" for reason in dict.fromkeys(reasons) if reason in REASONS)


def number(value: Any) -> str:
    """Return a reward or another number, `-` where there is none."""
    return f"{value:.4g}" if isinstance(value, int | float) else "-"


def as_json(value: Any) -> str:
    """Return a column as JSON, so that the text "4" and the number 4 differ."""
    return json.dumps(value, ensure_ascii=False)


def place_of(sample: Mapping[str, Any]) -> str:
    """Return split and step of a sample, such as `train step 3`. Step 0 of training has the failures before the first step."""
    if sample["split"] == TRAIN and sample["step"] == 0:
        return f"{TRAIN} before step 1"
    return f"{sample['split']} step {sample['step']}"


def render_sample(sample: Mapping[str, Any]) -> str:
    """Return a sample as text for a terminal: a line with step, group, reward and reason, then its columns, errors and messages."""
    parts = ", ".join(f"{printable(str(name))} {number(part)}" for name, part in sample["parts"].items())
    versions = sample["versions"]
    version = str(versions[0]) if versions[0] == versions[1] else f"{versions[0]}..{versions[1]}"
    facts = [
        place_of(sample),
        f"group {printable(str(sample['group']))} sample {sample['index']}",
        f"reward {number(sample['reward'])}" + (f" ({parts})" if parts else ""),
        printable(str(sample["reason"])),
        f"{sample['response_tokens']} tokens",
        f"version {version}",
    ]
    lines = ["== " + " | ".join(facts)]
    if info := dict(sample.get("info") or {}):
        if "answer" in info and info.get("ground_truth") == info["answer"]:
            del info["ground_truth"]  # the environment gets the answer under both names
        lines.append("   " + printable("; ".join(f"{key}: {as_json(value)}" for key, value in info.items())))
    if sample.get("filtered"):
        lines.append("   filtered, not trained: " + printable(str(sample["filtered"])))
    if sample.get("error"):
        lines.append("   error: " + printable(str(sample["error"])))
    for message in sample["messages"]:
        if not message["content"] and message["role"] != "assistant":  # an environment that only scores
            continue
        lines.append(f"[{printable(str(message['role']))}]")
        lines += _indented(message["content"])
    if sample.get("explanation"):
        lines += ["[explanation of the reward]", *_indented(sample["explanation"])]
    return "\n".join(lines) + "\n"


def _indented(text: Any) -> list[str]:
    return [f"  {line}" for line in printable(str(text)).split("\n")]
