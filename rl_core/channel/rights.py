"""What the members of a group may do at the channel server: which methods they may call, and how they may use which channel."""

from collections.abc import Mapping
from typing import Any

from rl_core.api.errors import ConfigError
from rl_core.messages.channel import WORKER_MESSAGES, Key
from rl_core.plan.groups import ChannelUse, GroupKind

USES = {
    "put": ChannelUse.PUT,
    "reserve": ChannelUse.PUT,
    "allocate": ChannelUse.PUT,
    "take": ChannelUse.TAKE,
    "requeue": ChannelUse.TAKE,
    "register": ChannelUse.PRODUCE,
    "done": ChannelUse.PRODUCE,
}
"""The use that a method makes of the channel in its first argument. Methods that are not listed need no right to a channel."""
_ELASTIC_METHODS = frozenset(
    {"create", "connect", "put", "reserve", "allocate", "hand_over", "abort", "take", "confirm", "requeue"}
    | {"depth", "full", "stats"}
)
_GANG_METHODS = _ELASTIC_METHODS | {"register", "done"}
RUNNER_METHODS = _GANG_METHODS | {"close", "move", "server_stats"}
"""All methods of the channel server."""


class ChannelRights:
    """What the members of each group of a job may do at the channel server. The runner may do everything.

    A channel that is named in the `GroupKind.channels` of a group may be used only by the groups that name it, and only in the ways that they
    name. Any other channel may be used by all groups; in WORKER_MESSAGES a group may use the messages of its own members only. Members of
    elastic groups may never register as producers.
    """

    def __init__(self, groups: Mapping[str, GroupKind]) -> None:
        """`groups` are the groups of the job by name; the uses of each channel are in `GroupKind.channels`.

        Members of an elastic group cannot register as producers, because a channel would wait for those that leave.
        """
        self.methods = {"runner": RUNNER_METHODS} | {
            group.name: _ELASTIC_METHODS if group.elastic else _GANG_METHODS for group in groups.values()
        }
        """A dict from the name of a group, or "runner", to the names of the RPC methods that its processes may call."""
        self._uses: dict[str, dict[str, frozenset[ChannelUse]]] = {}
        """Uses that are permitted, by channel and group."""
        for group in groups.values():
            for channel, uses in group.channels.items():
                self._uses.setdefault(channel, {})[group.name] = uses

    def check(self, group: str, method: str, args: tuple[Any, ...]) -> None:
        """Raise ConfigError unless the members of `group` may do with channels what a call of `method` with `args` does.

        The channels in a `GroupKind.channels` are created by the runner alone, and used as it says. Messages between workers are put and
        taken under the names of the group's own members. Whether the group may call `method` at all is in `methods`.
        """
        if group == "runner":
            return
        uses = [(args[0], USES[method])] if method in USES and args else []
        if method in ("take", "confirm") and args and isinstance(args[-1], dict):
            uses += [(channel, ChannelUse.TAKE) for channel in args[-1]]
        for channel, use in uses:
            holders = self._uses.get(channel)
            if holders is not None and use not in holders.get(group, ()):
                raise ConfigError(f"the key of group {group} does not permit to {use} on channel {channel!r}")
        if method in ("put", "reserve", "take") and args[0] == WORKER_MESSAGES:
            _check_own_messages(group, USES[method], args[1])
        if method == "create" and args and args[0] in self._uses:
            raise ConfigError(f"channel {args[0]!r} must be created by the runner, got group {group}")


def _check_own_messages(group: str, use: ChannelUse, key: Key) -> None:
    """Raise ConfigError unless the message with `key` belongs to the members of `group`.

    `key` begins with the names of the sender and of the receiver, such as "actor:0". A put is allowed only if the sender is in `group`, so
    that a receiver can rely on the group in the sender's name. A take is allowed only if the receiver or the sender is in `group`. The
    sender takes a message to withdraw it.
    """
    ends = key[:1] if use is ChannelUse.PUT else key[:2]
    if group not in [name.rpartition(":")[0] for name in ends]:
        raise ConfigError(
            f"the key of group {group} permits to {use} messages of its own members only, got {' to '.join(key[:2])}"
        )
