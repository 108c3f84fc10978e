"""Names of the Secrets with keys: the operator's master key, and each job's. No job may name one.

A process that reads the Secret of a job can publish weights to it; one that reads the master key can derive the Secret of every job.
"""

import re
from collections.abc import Iterator

from rl_core.api.cel import Cel, literal

MASTER_KEY = "rljob-operator-master-key"
"""Secret with the operator's master key."""
KEY_SECRETS = rf"(.+-keys-[0-9a-f]{{8}}|{MASTER_KEY})"
"""Names of all of them: a job's is `NAME-keys-` and the first 8 digits of its uid."""
_REFUSAL = "must not be that of keys (NAME-keys-UID or the master key), got"
_WAY_OUT = "name a Secret of your own"


def no_key_secret(path: str) -> Cel:
    """Return the rule that the name at `path` (of at most one optional block) is not one of keys."""
    block = path.rpartition(".")[0]
    absent = f"!has(self.{block}) || " if block else ""
    return Cel(
        holds=f"{absent}!self.{path}.matches({literal(f'^{KEY_SECRETS}$')})",
        refusal=f"{path} {_REFUSAL} %s; {_WAY_OUT}",
        values=(f"self.{path}",),
        field=path,
    )


def key_secret(path: str, name: str | None) -> Iterator[str]:
    """Yield a message when the name at `path` is one of keys."""
    if name is not None and re.fullmatch(KEY_SECRETS, name, re.ASCII):
        yield f"{path} {_REFUSAL} {name}; {_WAY_OUT}"
