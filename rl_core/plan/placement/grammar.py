"""The syntax of a placement: `ranks[:processes](, ...)`, such as `2-5:0-1,8,9-10:3-6`."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.api.errors import PlacementError, PlacementRangeError

_RANGE = re.compile(r"(\d+)(?:\s*-\s*(\d+))?", re.ASCII)
MOST_RANKS = 65_536
"""Ranks a map may number: 1,024 pods of 64 processes, the largest role of the schema."""
_DIGITS = 20
"""Digits that are read of a number: more only make it larger than any limit, and int() refuses texts of thousands."""


@dataclass(frozen=True, slots=True)
class PlacementPart:
    """Resources and the processes on them; one count divides the other."""

    resources: tuple[int, ...]
    processes: tuple[int, ...]

    def assignments(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return (process, its resources): consecutive processes share a resource, or each takes a consecutive slice."""
        num_resources, num_processes = len(self.resources), len(self.processes)
        if num_processes > num_resources:
            share = num_processes // num_resources
            return [(process, (self.resources[i // share],)) for i, process in enumerate(self.processes)]
        size = num_resources // num_processes
        return [(process, self.resources[i * size : (i + 1) * size]) for i, process in enumerate(self.processes)]


def parse_ranks(text: Any, available: int | None = None) -> list[int]:
    """Return the ranks of one `ranks` item (N, A-B, all) or a comma list of them, ascending.

    `available` is the number of ranks there are: needed for `all`, and checked when given. Raises PlacementError with
    "Invalid rank format", "must be unique" or "ascending order", PlacementRangeError with "out of range".
    """
    parts = _split(text)
    if "all" in parts:
        if available is None or len(parts) > 1:
            raise PlacementError(
                f"Invalid rank format {text!r}: `all` must stand alone and needs a known number of ranks; write the ranks"
            )
        return list(range(available))
    ranks: list[int] = []
    for part in parts:
        _extend_ascending(ranks, _range(part, available, part), part)
    return ranks


def parse_placement(value: Any, total: int) -> list[PlacementPart]:
    """Return the parts of a placement map over `total` resources.

    `value` is the text, an integer, or a sequence whose items are joined with commas. Left of ":" are resource ranks, inclusive, ascending
    and disjoint over the parts; `all` is allowed if it is the only part. Right of it are process ranks, contiguous from 0 over the parts;
    if they are omitted, the next processes are used, one per resource.
    Raises PlacementError (PlacementRangeError) naming the part, the rule and the total.
    """
    try:
        return _parts(value, total)
    except PlacementError as error:
        raise type(error)(f"{error} (total {total})") from error


def _parts(value: Any, total: int) -> list[PlacementPart]:
    texts = _split(value)
    used_ranks: list[int] = []
    next_process = 0
    parts: list[PlacementPart] = []
    for text in texts:
        left, colon, right = (piece.strip() for piece in text.partition(":"))
        if left == "all" and len(texts) > 1:
            raise PlacementError(f"Invalid rank format {text!r}: `all` must be the only part of the map, got {value!r}")
        resources = list(range(total)) if left == "all" else _range(left, total, text)
        if not resources:
            raise PlacementError(f"part {text!r}: there must be resources to place on, got none")
        _extend_ascending(used_ranks, resources, text)
        processes = _range(right, None, text) if colon else [next_process + i for i in range(len(resources))]
        if processes[0] != next_process:
            raise PlacementError(
                f"part {text!r}: Process ranks must be in ascending order without gaps, starting at {next_process}, "
                f"got {processes[0]}; write {next_process}-{next_process + len(processes) - 1}"
            )
        if len(resources) % len(processes) and len(processes) % len(resources):
            raise PlacementError(
                f"part {text!r}: the number of resources or of processes must divide the other, "
                f"got {len(resources)} and {len(processes)}"
            )
        next_process += len(processes)
        parts.append(PlacementPart(tuple(resources), tuple(processes)))
    return parts


def as_text(value: Any) -> str:
    """Return a scalar or a sequence as its comma-joined text."""
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return ",".join(str(item) for item in value)
    return str(value)


def _split(value: Any) -> Sequence[str]:
    parts = [part.strip() for part in as_text(value).split(",")]
    parts = [part for part in parts if part]
    if not parts or isinstance(value, bool):
        raise PlacementError(f"Invalid rank format {value!r}: a placement must name ranks; write N, A-B or all")
    return parts


def _range(text: str, total: int | None, part: str) -> list[int]:
    """Return the ranks of N or A-B, checked against `total` (None: against MOST_RANKS) before any list is made."""
    match = _RANGE.fullmatch(text)
    first, last = (_number(match[1]), _number(match[2] or match[1])) if match else (0, -1)
    if last < first:
        raise PlacementError(f"Invalid rank format {text!r} in part {part!r}; write N or A-B with A <= B")
    limit = MOST_RANKS if total is None else total
    if last >= limit:
        raise PlacementRangeError(
            f"part {part!r}: rank {last} is out of range [0, {limit - 1}]; lower it or add resources"
        )
    return list(range(first, last + 1))


def _number(digits: str) -> int:
    return int(digits.lstrip("0")[:_DIGITS] or "0")


def _extend_ascending(used_ranks: list[int], ranks: list[int], part: str) -> None:
    if used_ranks and ranks[0] <= used_ranks[-1]:
        repeated = sorted(set(used_ranks) & set(ranks))
        if repeated:
            raise PlacementError(
                f"part {part!r}: Resource ranks must be unique, got {repeated} twice; remove them here"
            )
        raise PlacementError(
            f"part {part!r}: Resource ranks must be in ascending order, got {ranks[0]} after {used_ranks[-1]}"
        )
    used_ranks.extend(ranks)
