"""Trackers of metrics: JSONL and TensorBoard are built in, W&B, Trackio and MLflow are optional dependencies.

TensorBoard, W&B and Trackio also show samples.

The runner calls them once per step. A tracker that raises is disabled with a warning, and the run goes on; `trackers/disabled`
counts them.
"""

import json
import logging
import math
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from crc32c import crc32c

from rl_core.api.errors import ConfigError
from rl_core.api.settings import TrackerSpec
from rl_core.observability.append import AppendFile

logger = logging.getLogger(__name__)
Metrics = Mapping[str, Any]


class SampleRow(NamedTuple):
    """A sample as a row of a tracker's table."""

    group: str
    sample: int
    """Place in its group."""
    reward: float
    reason: str
    prompt: str
    response: str


TEXT_CHARACTERS = 2000
"""Characters of a text that a tracker's table shows."""
GIF_SIZE_AT = 6
"""Offset of width and height, two bytes each, in a GIF file."""
MOST_TABLES = 16
"""Tables that may wait for the next metrics; older ones are dropped."""
MOST_CALLS = 1000
"""Calls that may wait for Trackio before it is disabled."""
FINISH_SECONDS = 10
"""Seconds that the end of a run waits for Trackio."""


class Tracker(Protocol):
    """A destination of metrics. The classes below implement it, and users can add their own."""

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Record the resolved job."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Record the metrics of one step."""

    def finish(self, status: str) -> None:
        """Flush and close; `status` is Finished or Failed."""


@runtime_checkable
class SampleTracker(Protocol):
    """A tracker that can also show samples."""

    def log_samples(self, split: str, step: int, rows: Sequence[SampleRow]) -> None:
        """Show some samples of a step; `split` is train or validation."""


@runtime_checkable
class VideoTracker(Protocol):
    """A tracker that can also show videos."""

    def log_videos(self, step: int, videos: Sequence[bytes]) -> None:
        """Show the GIF files of the evaluation after a step."""


class JsonlTracker:
    """Writes one JSON object per step. A number that is not finite is written as null.

    Lines that cannot be written because the disk is full are kept and written later.
    """

    def __init__(self, path: Path) -> None:
        """Append to `path`."""
        self._path, self._file = path, AppendFile(path)
        self._unwritten = b""

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Do nothing: the output folder holds job.yaml."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Write one line."""
        line = {"step": step} | {key: _plain(value) for key, value in metrics.items()}
        data = self._unwritten + json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            self._file.append(data)
        except OSError as error:
            logger.warning("%s could not be written, its lines are kept for later: %s", self._path, error)
            self._unwritten = data
        else:
            self._unwritten = b""

    def finish(self, status: str) -> None:
        """Write the lines that are still kept and close the file."""
        try:
            self._file.append(self._unwritten, sync=True)
        finally:
            self._file.close()


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def scalars(metrics: Metrics) -> dict[str, float]:
    """Return the finite numbers of `metrics`."""
    return {
        key: float(value)
        for key, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


class TensorBoardTracker:
    """TensorBoard event files, written without torch or tensorflow: records of [size, its CRC, event, its CRC].

    tensorboard's own writer opens the file four times an event and sums in Python on a thread of its own, beside the loop's messages.
    """

    def __init__(self, folder: Path) -> None:
        """Write below `folder`."""
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
        except ImportError as error:
            raise ConfigError(
                "tracker tensorboard needs the package: pip install 'rljob[actor]', or remove it from trackers"
            ) from error
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendFile(folder / name)
        self._write(file_version="brain.Event:2")

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Write the job as text."""
        from tensorboard.plugins.text.metadata import create_summary_metadata

        tensor = {"dtype": "DT_STRING", "string_val": [f"```\n{json.dumps(config, indent=1)}\n```".encode()]}
        value = self._summary.Value(tag="job", metadata=create_summary_metadata("job", ""), tensor=tensor)
        self._write(step=0, summary=self._summary(value=[value]))

    def log(self, step: int, metrics: Metrics) -> None:
        """Write the scalars of a step."""
        values = [self._summary.Value(tag=key, simple_value=value) for key, value in scalars(metrics).items()]
        self._write(step=step, summary=self._summary(value=values))

    def log_samples(self, split: str, step: int, rows: Sequence[SampleRow]) -> None:
        """Write the samples as the text `samples/<split>`, each text as a block of code: what it contains is shown, not rendered."""
        from tensorboard.plugins.text.metadata import create_summary_metadata

        tag = f"samples/{split}"
        blocks = [
            f"**{row.group} {row.sample}**, reward {row.reward:.4g}, {row.reason}\n\n{_quoted(row.prompt)}\n\n{_quoted(row.response)}"
            for row in rows
        ]
        tensor = {"dtype": "DT_STRING", "string_val": ["\n\n---\n\n".join(blocks).encode(errors="replace")]}
        value = self._summary.Value(tag=tag, metadata=create_summary_metadata(tag, ""), tensor=tensor)
        self._write(step=step, summary=self._summary(value=[value]))

    def log_videos(self, step: int, videos: Sequence[bytes]) -> None:
        """Write the videos as the images `val/episode_<number>`, which TensorBoard shows moving."""
        values = []
        for index, video in enumerate(videos):
            width, height = struct.unpack_from("<HH", video, GIF_SIZE_AT)
            image = self._summary.Image(height=height, width=width, colorspace=3, encoded_image_string=video)
            values.append(self._summary.Value(tag=f"val/episode_{index}", image=image))
        self._write(step=step, summary=self._summary(value=values))

    def finish(self, status: str) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, **event: Any) -> None:
        data = self._event(wall_time=time.time(), **event).SerializeToString()
        size = struct.pack("<Q", len(data))
        self._file.append(size + _masked_crc(size) + data + _masked_crc(data))


def _masked_crc(data: bytes) -> bytes:
    """Return the CRC32C of `data` as record files keep it: rotated by 15 bits, plus a constant."""
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _quoted(text: str) -> str:
    """Return `text` as an indented block of code of Markdown, which nothing in it can end."""
    return "\n".join(f"    {line}" for line in text[:TEXT_CHARACTERS].splitlines() or [""])


def _cells(row: SampleRow) -> list[Any]:
    """Return a row of a table: texts are cut, and lone surrogates, which UTF-8 cannot hold, become question marks."""
    shortened = row._replace(prompt=row.prompt[:TEXT_CHARACTERS], response=row.response[:TEXT_CHARACTERS])
    return [cell.encode(errors="replace").decode() if isinstance(cell, str) else cell for cell in shortened]


class WandbTracker:
    """Weights & Biases (extra `wandb`)."""

    def __init__(self, spec: TrackerSpec, *, name: str, folder: Path) -> None:
        """Start a run called `name`."""
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "tracker wandb needs the package: pip install 'rljob[wandb]', or remove it from trackers"
            ) from error
        settings = wandb.Settings(base_url=spec.uri) if spec.uri else None
        self._run = wandb.init(
            project=spec.project or "rljob",
            name=name,
            dir=str(folder),
            mode="offline" if spec.offline else "online",
            settings=settings,
        )

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Record the job as the run's config."""
        self._run.config.update(dict(config))

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the scalars of a step."""
        self._run.log(scalars(metrics), step=step)

    def log_samples(self, split: str, step: int, rows: Sequence[SampleRow]) -> None:
        """Log the samples as the table `samples/<split>`. It has a column with the step, as W&B takes no values for earlier steps."""
        import wandb

        data = [[step, *_cells(row)] for row in rows]
        self._run.log({f"samples/{split}": wandb.Table(columns=["step", *SampleRow._fields], data=data)}, commit=False)

    def finish(self, status: str) -> None:
        """End the run."""
        self._run.finish(exit_code=0 if status == "Finished" else 1)


class TrackioTracker:
    """Trackio (extra `trackio`): writes to `trackio/` in the output folder, or sends to a Trackio server.

    A thread makes all calls of the library, and the run does not wait for them: where a Hugging Face token is set, `trackio.init` asks the
    Hub for the user's name without a time limit, and a server may be slow. The first error of the thread is raised by the next call.
    """

    def __init__(self, spec: TrackerSpec, *, name: str, folder: Path) -> None:
        """Start a run called `name`. A run of that name in the folder is continued; on a server each start of the runner is a run.

        Raises ConfigError for `uri` with `offline`, a `uri` that is not an address of HTTP, or a missing package.
        """
        if spec.uri and spec.offline:
            raise ConfigError(f"tracker trackio takes uri or offline, got uri {spec.uri} with offline true; remove one")
        if spec.uri and not spec.uri.startswith(("http://", "https://")):
            raise ConfigError(
                f"uri of tracker trackio must be the http:// or https:// address of a Trackio server, got {spec.uri}; "
                "for a Space, set TRACKIO_SPACE_ID in the environment of the runner"
            )
        if spec.uri or spec.offline:  # the library prefers these to what is passed to it
            for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
                os.environ.pop(variable, None)
        target = folder / "trackio"
        os.environ["TRACKIO_DIR"] = str(target)  # the library reads it once, when it is imported
        try:
            import trackio
        except ImportError as error:
            raise ConfigError(
                "tracker trackio needs the package: pip install 'rljob[trackio]', or remove it from trackers"
            ) from error
        if target != trackio.TRACKIO_DIR:
            raise RuntimeError(f"trackio was imported before and writes to {trackio.TRACKIO_DIR}, not to {target}")
        remote = spec.uri or any(map(os.environ.get, ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")))
        options = {"server_url": spec.uri, "resume": "never" if remote else "allow", "embed": False}
        options |= {"project": spec.project or "rljob", "name": name, "auto_log_gpu": False, "auto_log_cpu": False}
        self._calls: queue.Queue[Callable[[Any], object] | None] = queue.Queue(MOST_CALLS)
        """Functions that the thread calls with the Trackio run, in this order. None tells it to end the run."""
        self._error: Exception | None = None
        """What ended the thread early. The thread writes it, the run's thread reads it."""
        self._thread = threading.Thread(target=self._make_calls, args=(options,), name="trackio", daemon=True)
        self._thread.start()

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Store the resolved job as the configuration of the Trackio run."""
        self._call(lambda run: run.config.update(config))

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the scalars of a step."""
        self._call(lambda run: run.log(scalars(metrics), step=step))

    def log_samples(self, split: str, step: int, rows: Sequence[SampleRow]) -> None:
        """Log the samples as the table `samples/<split>` of the step."""
        import trackio

        table = trackio.Table(columns=list(SampleRow._fields), data=[_cells(row) for row in rows])
        self._call(lambda run: run.log({f"samples/{split}": table}, step=step))

    def finish(self, status: str) -> None:
        """Write what is left and end the Trackio run. `status` is not used, as Trackio has no field for it.

        Raises TimeoutError if this takes longer than FINISH_SECONDS; metrics that are not written by then are lost.
        """
        self._call(None)
        self._thread.join(FINISH_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(f"trackio has not ended within {FINISH_SECONDS} s, its last metrics may be missing")
        if self._error:
            raise self._error

    def _call(self, call: Callable[[Any], object] | None) -> None:
        if self._error:
            raise self._error
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise TimeoutError(f"trackio does not answer, {MOST_CALLS} calls wait for it") from None

    def _make_calls(self, options: Mapping[str, Any]) -> None:
        """Start the run, make the calls in their order, and end the run."""
        import trackio

        try:
            run = trackio.init(**options)
            while call := self._calls.get():
                call(run)
            run.finish()
        except Exception as error:  # noqa: BLE001 - the next call raises it
            self._error = error


class MlflowTracker:
    """MLflow (extra `mlflow`)."""

    def __init__(self, spec: TrackerSpec, *, name: str) -> None:
        """Start a run called `name`."""
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise ConfigError(
                "tracker mlflow needs the package: pip install 'rljob[mlflow]', or remove it from trackers"
            ) from error
        self._client = MlflowClient(tracking_uri=spec.uri)
        project = spec.project or "rljob"
        existing = self._client.get_experiment_by_name(project)
        experiment = existing.experiment_id if existing else self._client.create_experiment(project)
        self._run_id = self._client.create_run(experiment, run_name=name).info.run_id

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Attach the job as job.json."""
        self._client.log_dict(self._run_id, dict(config), "job.json")

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the scalars of a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(
            self._run_id, metrics=[Metric(key, value, now, step) for key, value in scalars(metrics).items()]
        )

    def finish(self, status: str) -> None:
        """End the run."""
        self._client.set_terminated(self._run_id, status="FINISHED" if status == "Finished" else "FAILED")


class Trackers:
    """All trackers of a run."""

    def __init__(self, sinks: Iterable[Tracker], *, disabled: Mapping[str, str] | None = None) -> None:
        """Hold `sinks`. `disabled` are the trackers of the job that are left out, with the reason; None = none."""
        self._sinks = list(sinks)
        self.disabled = dict(disabled or {})
        """Names of disabled trackers -> why. Another thread reads them, so this is replaced and never changed."""
        self._tables: list[tuple[str, int, list[SampleRow]]] = []
        """Tables that the next call of `log` shows."""
        self._lock = threading.Lock()
        """Guards `_tables`, which another thread than the loop's adds to."""

    @classmethod
    def build(cls, specs: Iterable[TrackerSpec], *, name: str, output: Path) -> "Trackers":
        """Open metrics.jsonl in `output` and the trackers of the job.

        A tracker that cannot be opened, for example because its server is down, is left out.

        Raises ConfigError for a missing package, OSError for a folder that cannot be written.
        """
        sinks: list[Tracker] = [JsonlTracker(output / "metrics.jsonl")]
        disabled: dict[str, str] = {}
        for spec in specs:
            try:
                sinks.append(_open(spec, name=name, output=output))
            except ConfigError:
                raise
            except Exception as error:
                logger.warning("tracker %s could not be opened and is disabled", spec.name, exc_info=True)
                disabled[spec.name] = _reason(error)
        return cls(sinks, disabled=disabled)

    def _each(self, method: str, *args: Any, to: type = object) -> None:
        for sink in [sink for sink in self._sinks if isinstance(sink, to)]:
            try:
                getattr(sink, method)(*args)
            except Exception as error:
                name = type(sink).__name__
                logger.warning("tracker %s raised in %s and is disabled", name, method, exc_info=True)
                self._sinks.remove(sink)
                self.disabled = {**self.disabled, name.removesuffix("Tracker").lower(): _reason(error)}

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Pass the job to every tracker."""
        self._each("log_config", config)

    def log(self, step: int, metrics: Metrics) -> None:
        """Pass the metrics of a step to every tracker, after the tables that were added since the last call."""
        with self._lock:
            tables, self._tables = self._tables, []
        for table in tables:
            self._each("log_samples", *table, to=SampleTracker)
        self._each(
            "log", step, {**metrics, "trackers/disabled": float(len(self.disabled))} if self.disabled else metrics
        )

    def add_samples(self, split: str, step: int, rows: Sequence[SampleRow]) -> None:
        """Show samples with the next metrics. May be called from any thread."""
        with self._lock:
            self._tables = [*self._tables, (split, step, list(rows))][-MOST_TABLES:]

    def log_videos(self, step: int, videos: Sequence[bytes]) -> None:
        """Show the GIF files of an evaluation. Called by the loop only."""
        if videos:
            self._each("log_videos", step, videos, to=VideoTracker)

    def finish(self, status: str) -> None:
        """Finish every tracker."""
        self._each("finish", status)


def _reason(error: Exception) -> str:
    """Return the type and the text of an error on one line of at most 200 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:200] if text else type(error).__name__


def _open(spec: TrackerSpec, *, name: str, output: Path) -> Tracker:
    if spec.name == "tensorboard":
        return TensorBoardTracker(output / "tensorboard")
    if spec.name == "wandb":
        return WandbTracker(spec, name=name, folder=output)
    if spec.name == "trackio":
        return TrackioTracker(spec, name=name, folder=output)
    return MlflowTracker(spec, name=name)
