"""Trackers: JSONL and TensorBoard hold what was logged; one that raises never harms the run."""

import errno
import json
import os

from rl_core.api.settings import TrackerSpec
from rl_core.observability import append as appending
from rl_core.observability.trackers import JsonlTracker, SampleRow, TensorBoardTracker, Trackers


def test_jsonl_holds_one_object_per_step_and_no_nan(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(1, {"reward/mean": 0.5, "train/kl": float("nan")})
    tracker.finish("Finished")
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "reward/mean": 0.5, "train/kl": None}


def test_lines_that_find_no_room_are_written_whole_when_there_is(tmp_path, monkeypatch, caplog):
    path = tmp_path / "metrics.jsonl"
    trackers, written, refused = Trackers([JsonlTracker(path)]), os.write, [False]

    def write(file, data):
        if not refused[0]:
            return written(file, data)
        if len(data) < 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(file, data[:20])

    monkeypatch.setattr(appending.os, "write", write)
    trackers.log(1, {})
    refused[0] = True
    for step in (2, 3):
        trackers.log(step, {"reward/mean": 0.5})
    assert path.read_text() == '{"step":1}\n' and caplog.text.count("kept for later") == 2
    refused[0] = False
    for step in (4, 5):
        trackers.log(step, {})
    trackers.finish("Finished")
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5]


def test_tensorboard_reads_back_the_scalars(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path)
    tracker.log_config({"spec": {"model": "m"}})
    for step, value in ((1, 0.25), (2, 0.5)):
        tracker.log(step, {"reward/mean": value, "text": "left out"})
    tracker.finish("Finished")
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


def test_samples_are_shown_with_the_next_metrics_as_text_that_is_not_rendered(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = Trackers([JsonlTracker(tmp_path / "metrics.jsonl"), TensorBoardTracker(tmp_path)])
    trackers.add_samples("train", 3, [SampleRow("0-1", 0, 0.5, "stop", "2+2=", "4\n```\n<b>bold</b> \ud800")])
    trackers.log(4, {"reward/mean": 0.5})
    trackers.finish("Finished")
    (shown,) = EventAccumulator(str(tmp_path)).Reload().Tensors("samples/train")
    text = shown.tensor_proto.string_val[0].decode()
    assert shown.step == 3 and "reward 0.5, stop" in text
    assert [line for line in text.splitlines() if "```" in line or "<b>" in line] == ["    ```", "    <b>bold</b> ?"]


def test_a_tracker_that_raises_is_disabled_and_the_others_go_on(caplog):
    class Bad:
        def log(self, step, metrics):
            raise OSError("no space left on device")

    class Good:
        def __init__(self):
            self.steps = []

        def log(self, step, metrics):
            self.steps.append((step, metrics))

    good = Good()
    trackers = Trackers([Bad(), good])
    trackers.log(1, {})
    trackers.log(2, {})
    assert list(trackers.disabled.values()) == ["OSError: no space left on device"]
    assert good.steps == [(1, {}), (2, {"trackers/disabled": 1.0})] and caplog.text.count("is disabled") == 1


def test_a_tracker_that_cannot_be_opened_is_disabled_and_the_others_go_on(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("in the way")
    wrong = TrackerSpec(name="mlflow", uri="nowhere://server")
    trackers = Trackers.build([wrong, TrackerSpec(name="tensorboard")], name="a", output=tmp_path)
    trackers.log(1, {"reward/mean": 0.5})
    trackers.finish("Finished")
    for name in ("mlflow", "tensorboard"):
        assert f"tracker {name} could not be opened and is disabled" in caplog.text
    assert {record.levelname for record in caplog.records if "disabled" in record.message} == {"WARNING"}
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 1,
        "reward/mean": 0.5,
        "trackers/disabled": 2.0,
    }


def test_wandb_offline_writes_into_the_output_folder(tmp_path):
    trackers = Trackers.build([TrackerSpec(name="wandb", offline=True)], name="a", output=tmp_path)
    trackers.log(1, {"reward/mean": 0.5})
    trackers.finish("Finished")
    assert list((tmp_path / "wandb").glob("offline-run-*"))


def test_mlflow_holds_the_metrics(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    uri = (tmp_path / "mlruns").as_uri()
    trackers = Trackers.build([TrackerSpec(name="mlflow", uri=uri)], name="a", output=tmp_path)
    trackers.log(3, {"reward/mean": 0.5})
    trackers.finish("Finished")
    client = MlflowClient(tracking_uri=uri)
    run = client.search_runs([client.get_experiment_by_name("rljob").experiment_id])[0]
    assert run.data.metrics["reward/mean"] == 0.5 and run.info.status == "FINISHED"
