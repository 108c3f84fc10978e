"""`rljob metrics`: prints what the metrics of a run mean."""

import shutil
import sys
import textwrap

from rl_core.api.errors import ConfigError
from rl_core.observability.metric_list import METRICS, search

INDENT = "    "


def show_metrics(name: str | None) -> int:
    """Print the metric `name`, those that contain the word, or all of them; return 0. Raises ConfigError when there is none."""
    found = METRICS if name is None else search(name)
    if not found:
        raise ConfigError(f"a metric must be one of the list, got {name}; `rljob metrics` prints the list")
    width = min(shutil.get_terminal_size().columns, 100)
    for metric in found:
        unit = f" ({metric.unit})" if metric.unit else ""
        meaning = textwrap.fill(metric.meaning, width, initial_indent=INDENT, subsequent_indent=INDENT)
        sys.stdout.write(f"{metric.name}{unit}\n{meaning}\n")
    return 0
