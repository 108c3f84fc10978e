"""`rljob metrics`: prints what the metrics of a run mean, and the last values of a run."""

import shutil
import sys
import textwrap
from pathlib import Path

from rl_core.api.errors import ConfigError
from rl_core.observability.metric_list import METRICS, Metric, find, search
from rl_core.view.metrics import MetricColumns

INDENT = "    "
FILE = "metrics.jsonl"
FLAG = "0 or 1"
"""Unit that is not printed behind a value."""


def show_metrics(name: str | None, word: str | None = None) -> int:
    """Print the meaning of the metric `name`; else of those whose name or meaning contains it, or of the nearest names; None: of all. Return 0.

    Where `name` is the output folder of a run, its last values are printed: those of the metric `word`, of the metrics whose names contain
    it, or of all. Raises ConfigError when there is none.
    """
    if name is not None and (Path(name) / FILE).is_file():
        return _show_values(Path(name), word)
    if word is not None:
        raise ConfigError(f"the first of two words must be the output folder of a run, got {name}: it has no {FILE}")
    metrics = METRICS if name is None else search(name)
    if not metrics:
        raise ConfigError(f"a metric must be one of the list, got {name}; `rljob metrics` prints the list")
    for metric in metrics:
        unit = f" ({metric.unit})" if metric.unit else ""
        sys.stdout.write(f"{metric.name}{unit}\n{_meaning(metric)}")
    return 0


def _show_values(folder: Path, text: str | None) -> int:
    columns = MetricColumns(folder / FILE)
    series = {name: values for name in columns.names() if (values := columns.series(name))}
    names = [name for name in series if text is None or text.lower() in name.lower()]
    if text in series:
        names = [text]
    if not names:
        raise ConfigError(
            f"{folder} must hold a metric {text or ''}, got none; `rljob metrics {folder}` prints all".replace(
                "  ", " "
            )
        )
    for name, following in zip(names, [*names[1:], ""], strict=True):
        step, value = series[name][-1]
        metric = find(name)
        unit = f" {metric.unit}" if metric is not None and metric.unit not in ("", FLAG) else ""
        is_last = metric is not None and metric != find(following)  # metrics in a row may have one meaning
        sys.stdout.write(
            f"{name}: {value:.6g}{unit} (step {step})\n{_meaning(metric) if metric is not None and is_last else ''}"
        )
    return 0


def _meaning(metric: Metric) -> str:
    width = min(shutil.get_terminal_size().columns, 100)
    return textwrap.fill(metric.meaning, width, initial_indent=INDENT, subsequent_indent=INDENT) + "\n"
