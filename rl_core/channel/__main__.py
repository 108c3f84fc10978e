"""`python -m rl_core.channel`: the channel server of a job, in the runner's pod. It serves until SIGTERM."""

import logging
import os
import signal
import sys
import threading

from rl_core.api.errors import ConfigError, exit_code
from rl_core.api.identity import Identity

logger = logging.getLogger("rl_core.channel")


def main() -> int:
    """Serve at RLJOB_CHANNEL with the identity and keys of the environment; return the exit code."""
    logging.basicConfig(
        level=os.environ.get("RLJOB_LOG_LEVEL", "INFO").upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    try:
        server = _serve(Identity.from_env())
    except ConfigError as error:
        logger.error("%s", error)
        return exit_code(error)
    logger.info("channel server at %s", server.address)
    stopping.wait()
    server.close()
    return 0


def _serve(identity: Identity):  # type: ignore[no-untyped-def]
    from rl_core.channel.server import ChannelServer
    from rl_core.plan.groups import kinds_of_environment
    from rl_core.transports.curve import KeyRing
    from rl_core.transports.sockets import is_loopback, split_address

    if not identity.channel:
        raise ConfigError(
            "environment variable RLJOB_CHANNEL must be tcp://host:port for the channel server, got nothing"
        )
    kinds = kinds_of_environment()
    keys = KeyRing(identity.curve_dir, "channel", kinds) if identity.curve_dir else None
    host, port = split_address(identity.channel)
    bind = host if is_loopback(host) else os.environ.get("RLJOB_BIND", "0.0.0.0")
    return ChannelServer(f"tcp://{bind}:{port}", keys, identity=identity, kinds=kinds).start()


if __name__ == "__main__":
    sys.exit(main())
