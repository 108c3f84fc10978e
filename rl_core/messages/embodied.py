"""Messages of the embodied programs: which workers take part in a collection of trajectories, and what came of their episodes.

runner -> env, rollout    CollectionRequest, argument of `interact` and `generate`
runner -> actor           CollectionRequest, argument of `recv_rollout_trajectories`
env    -> rollout         EnvOutput, answered by an array of actions
env    -> child           SimulatorSettings, SimulatorReset, SimulatorChunk; answers: SimulatorAnswer, or EnvFailure
env    -> runner          EpisodeStats
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

from rl_core.messages.registry import record

if TYPE_CHECKING:
    from rl_core.api.job import RLJobSpec

Mode = Literal["train", "eval"]
"""What a policy acts for: trajectories to train on, or an evaluation."""


@record
class CollectionRequest:
    """Describes a collection of trajectories or an evaluation: its workers, and the keys of the messages that they exchange.

    The runner passes it to every env worker and rollout that takes part, and to the trainer.
    """

    number: int
    """Number of the collection in the run. A repeated collection has a new number. Every key contains it, so that messages of an earlier
    collection are not taken for messages of this one.
    """
    step: int
    """Training step that the trajectories are for."""
    envs: tuple[int, ...]
    """Ranks of the env workers, in the order of the simulators. Keys name an env worker by its index here."""
    rollouts: tuple[int, ...]
    """Ranks of the rollouts. Keys name a rollout by its index here."""
    actors: int = 1
    """Number of data ranks."""
    mode: Mode = "train"
    episodes: int = 0
    """Episodes to evaluate, over all env workers; 0 in training."""
    version: int | None = None
    """A rollout waits until it serves this version of the weights or a later one. None: it does not wait."""
    direct: tuple[tuple[int, int, str], ...] = ()
    """(index of an env worker, index of a rollout, address of the env worker) for each pair with a direct connection. Others use channels."""

    @classmethod
    def of_job(cls, spec: "RLJobSpec", *, step: int, mode: Mode = "train", episodes: int = 0) -> Self:
        """Return the request for a collection by all workers of a job: with number 0, no direct connections and no version to wait for.

        It is the default of workers that are called without a request.
        """
        return cls(
            number=0,
            step=step,
            envs=tuple(range(spec.env.replicas)),
            rollouts=tuple(range(spec.rollout.replicas)),
            actors=spec.actor.world_size,
            mode=mode,
            episodes=episodes,
        )

    def key(self, stage: int, env: int, rollout: int) -> str:
        """Return the key of the messages of one pipeline stage between an env worker and a rollout. `env` and `rollout` are their indices."""
        return f"{self.number} {env}_{rollout}_{self.mode}_{stage}"

    def address(self, env: int, rollout: int) -> str | None:
        """Return the address at which the env worker `env` listens for the rollout `rollout`, or None if they exchange messages by channels."""
        pair = (env, rollout)
        return next((address for *indices, address in self.direct if tuple(indices) == pair), None)

    @property
    def prefix(self) -> str:
        """Return the first characters of all keys of messages between env workers and rollouts of this collection."""
        return f"{self.number} "

    def opening_key(self, rollout: int) -> str:
        """Return the key of the first message that the rollout `rollout` sends on a direct connection."""
        return f"{self.number} opens {rollout}"

    @staticmethod
    def columns_key(stage: int) -> str:
        """Return the name of the entry of that message which tells the env worker where to write large observations of a stage."""
        return f"columns {stage}"

    def trajectory_key(self, data_rank: int) -> str:
        """Return the key under which a data rank finds its trajectories."""
        return f"collection {self.number} rank {data_rank}"


@record
class EpisodeStats:
    """The episodes that ended at one env worker in a collection."""

    episodes: list[dict[str, Any]] = field(default_factory=list)
    """Each has slot, return (undiscounted), length, success_once and success_at_end."""
    steps: int = 0
    """Steps that the simulators made."""
    lost: int = 0
    """Episodes that were lost with their simulator."""
    interventions: int = 0
    """Actions that a person took."""
    videos: list[bytes] = field(default_factory=list)
    """GIF files of the first episodes of an evaluation."""


@record
class SimulatorSettings:
    """How a child process builds its simulator."""

    id: str
    kwargs: dict[str, Any]
    auto_reset: bool
    ignore_terminations: bool = False
    """Whether an episode that has terminated goes on."""
    label: str = "simulator"
    extensions: list[str] = field(default_factory=list)
    search_path: list[str] = field(default_factory=list)
    barrier: bool = True
    """Whether keys and memory of the pod are hidden from the code of the simulator."""
    memory_bytes: int | None = None
    """Limit of the address space; None = a share of the container's memory."""
    record_every: int = 0
    """Steps between two frames of an episode that is recorded; 0: none can be recorded."""


@dataclass(kw_only=True, slots=True)
class SimulatorReset:
    """Begin an episode."""

    seed: int
    record: bool = False
    """Whether the simulator renders frames of the episode."""
    row: int = 0
    """Where the simulator has a place in shared memory: row of its observation there."""


@dataclass(kw_only=True, slots=True)
class SimulatorChunk:
    """Make the actions of a chunk, and begin the next episode with `seed` where one ends."""

    actions: Any
    """[C, ...]"""
    seed: int
    row: int = 0
    """See `SimulatorReset`."""


@dataclass(kw_only=True, slots=True)
class SimulatorAnswer:
    """What one simulator answers: to a reset the observation alone. Observations that are in shared memory are left out."""

    obs: dict[str, Any] = field(default_factory=dict)
    final_obs: dict[str, Any] | None = None
    rewards: tuple[float, ...] = ()
    """Of each step that was made."""
    terminated: bool = False
    truncated: bool = False
    successes: tuple[bool, ...] = ()
    """Whether the task was solved, one entry for each step that the simulator made."""
    intervene_actions: Any = None
    """[C, ...]: actions that a person took; None where no one did."""
    intervene_flags: Any = None
    """[C] bool: where a person did."""
    frames: list[Any] = field(default_factory=list)
    """[height, width, 3] uint8 each: what a recorded episode looked like since the last answer."""
