"""The messages between a rollout worker and the child process that runs its engine (`rollouts.sglang`).

worker -> child   EngineSettings, answered by EngineReady or EngineFailure; then EngineRows, EngineAbort and EngineCall
child -> worker   EngineTokens for rows that are streamed; EngineOutputs for rows as they end; EngineAnswer or EngineFailure for each call
"""

from typing import Any

from rl_core.messages.registry import record
from rl_core.messages.weights import DeviceSource, GroupSource, SharedSource


@record
class EngineSettings:
    """The settings with which the child builds the engine."""

    options: dict[str, Any]
    """Keyword arguments of the engine."""
    architecture: str
    """Architecture of the model, such as "LlamaForCausalLM"; "" if its configuration does not name it."""
    owner: str
    """Name after which SGLang's file in shared memory is called, see `transports.tokens`."""


@record
class EngineReady:
    """The engine is ready. Its weights do not have a version yet."""

    pids: list[int]
    """Every process of the engine: the child's own first."""


@record
class EngineRow:
    """One sequence to continue."""

    key: int
    ids: list[int]
    sampling: dict[str, Any]
    """As the engine's own sampling settings."""
    stream: bool = False
    """Whether EngineTokens are wanted while the row runs."""


@record
class EngineRows:
    """Rows to generate. They join the rows that are already running."""

    rows: list[EngineRow]


@record
class EngineAbort:
    """Rows to stop now. Each is returned with the tokens that it has."""

    keys: list[int]


@record
class EngineTokens:
    """New ids of a row that still runs. Its output has all ids."""

    key: int
    ids: list[int]


@record
class EngineOutput:
    """The result of a row."""

    key: int
    ids: list[int]
    logprobs: list[float]
    """Of softmax(logits / temperature), one per id."""
    reason: str
    """stop, length, abort; error = the row failed, see `message`."""
    versions: list[tuple[int, int, str]]
    """(start, end, version of the weights) over `ids`."""
    message: str = ""
    """Why the row was aborted by the engine, or failed."""
    data_fault: bool = False
    """Whether the row itself is at fault, so that it would fail again."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of its prompt whose keys and values another row had left."""


@record
class EngineOutputs:
    """The results of rows that ended together."""

    outputs: list[EngineOutput]


@record
class EngineCall:
    """A call of one of the child's methods."""

    call: int
    method: str
    arguments: dict[str, Any]


@record
class EngineAnswer:
    """The return value of a call."""

    call: int
    value: Any


@record
class EngineFailure:
    """The error of a call. `call` is 0 if the engine could not be built."""

    call: int
    type: str
    """Name of the exception."""
    message: str


@record
class TensorPlace:
    """The position of a tensor in the memory that worker and child share."""

    name: str
    shape: list[int]
    dtype: str
    offset: int
    """First byte."""


@record
class SourceLoad:
    """A version that each process of the engine reads from its source and loads."""

    source: SharedSource | DeviceSource | GroupSource
    manifest: bytes
    """`WeightManifest.packed`."""
    bucket_bytes: int
    """Size by which the tensors are cut into buckets."""
    wanted: list[str]
    """Names of the tensors that the engine must be given."""
    whole: bool
    """Whether all that the engine holds is read back and compared afterwards."""
    collective_seconds: float
    """Deadline of one operation of the process group."""
