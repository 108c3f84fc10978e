"""The messages that open an RPC connection, and the record of a handler's error.

client -> server   hello: Hello        server -> client   welcome: Welcome
server -> client   error: PackedError
"""

from rl_core.api.identity import Identity
from rl_core.messages.registry import record


@record
class Caller:
    """The process at the other end of a connection. With keys its role and group are authenticated; it states all other fields itself."""

    job: str
    uid: str
    """Unique id of the job."""
    epoch: int
    """Its epoch when it was started; each message carries the present one."""
    role: str
    """runner, channel, actor, rollout, env or supervisor."""
    group: str
    rank: int
    incarnation: tuple[int, int]
    """(attempt, restarts): a higher one replaces a lower one of the same group and rank."""

    @property
    def name(self) -> str:
        """Return `group:rank`."""
        return f"{self.group}:{self.rank}"

    @classmethod
    def of(cls, identity: Identity | None) -> "Caller | None":
        """Return the caller record of a process; None for an anonymous process."""
        if identity is None:
            return None
        return cls(
            job=identity.job,
            uid=identity.uid,
            epoch=identity.epoch,
            role=identity.role,
            group=identity.group,
            rank=identity.rank,
            incarnation=identity.incarnation,
        )


@record
class PackedError:
    """An error of a handler."""

    type: str
    """Name of its class."""
    message: str
    traceback: str
    """As Python prints it, cut to a size that always travels."""


@record
class MemoryProof:
    """Names a file of this process in /dev/shm. A peer that can read its content runs on the same host as the same user."""

    file: str
    digest: bytes
    """BLAKE2b of the content."""


@record
class Hello:
    """The first message of a client, again after each reconnection."""

    caller: Caller | None
    """None = anonymous, legal without keys only."""
    memory: MemoryProof | None
    """None = the client takes no segments."""
    pending: tuple[int, ...]
    """Ids of the requests that it waits for."""


@record
class Welcome:
    """The server's answer to Hello."""

    caller: Caller | None
    """Who the server is."""
    instance: bytes
    """Random per server process: another value means that another process took the address."""
    memory: MemoryProof | None
    """None = the server takes no segments."""
    readable: bool
    """Whether the server could read the client's proof."""
    running: tuple[int, ...]
    """Those of the pending requests that it works on."""
    finished: tuple[int, ...]
    """Those of the pending requests whose answers were sent, or could not be."""
