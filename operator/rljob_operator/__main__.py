"""`python -m rljob_operator`: the operator as a process.

Inside a pod it speaks as its service account, elsewhere as KUBECONFIG says. Settings: the table in `settings.py`. Exit codes: 0 after
SIGTERM or SIGINT, 1 when the Lease was lost or a part broke, 2 for a setting that breaks its rule.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

from rljob_operator.runtime import logs
from rljob_operator.runtime.settings import SettingError, Settings

logger = logging.getLogger("rljob_operator")


def main() -> int:
    """Run until a signal asks to stop; return the exit code."""
    try:
        settings = Settings.from_env(os.environ)
    except SettingError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    logs.configure(level=settings.log_level, form=settings.log_format)
    try:
        asyncio.run(_run(settings))
    except Exception:
        logger.exception("the operator ends")
        return 1
    return 0


async def _run(settings: Settings) -> None:
    from rljob_operator.runtime import app, credentials

    loop = asyncio.get_running_loop()

    def take_signals() -> None:
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, operator.stop)

    operator = app.Operator(settings=settings, configuration=credentials.configuration, on_watching=take_signals)
    take_signals()
    await operator.run()


if __name__ == "__main__":
    sys.exit(main())
