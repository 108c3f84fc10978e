"""Reports to the hub that a supervisor's child process has ended.

The supervisor imports this module only shortly after its start, so that it needs little memory.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rl_core.api.errors import RLJobError
from rl_core.api.identity import Identity
from rl_core.messages.members import MemberId
from rl_core.transports.curve import KeyRing
from rl_core.transports.rpc import RpcClient

logger = logging.getLogger(__name__)
TIMEOUT = 3.0


def report_child_ended(environ: Mapping[str, str], restarts: int, code: int) -> None:
    """Report to the hub that the process described by `environ` ended with exit code `code` after `restarts` restarts.

    If the hub does not answer within 3 seconds, a warning is logged. The hub then learns of the end from the missing heartbeats.
    """
    child = Identity.from_env(environ)
    if not child.hub:
        return
    keys = KeyRing(Path(child.curve_dir), child.role) if child.curve_dir else None
    member = MemberId(name=child.name, incarnation=(child.attempt, restarts))
    reporter = replace(child, role="supervisor", restarts=restarts)  # the hub refuses reports of another incarnation
    client = RpcClient(child.hub, keys, reporter, service="hub")
    try:
        client.call_sync("child_ended", member, code, timeout=TIMEOUT, idempotent=True)
    except RLJobError as error:
        logger.warning("could not report to the hub that %s ended: %s", child.name, error)
    finally:
        client.close()
