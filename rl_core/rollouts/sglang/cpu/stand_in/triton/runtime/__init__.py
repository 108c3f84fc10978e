"""Stand-in for `triton.runtime`: there is no driver, as with the package itself on a machine without an accelerator."""

from typing import Any


class _Driver:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"the CPU stand-in of triton has no driver, and its {name} was asked for; use a GPU")


driver = _Driver()
