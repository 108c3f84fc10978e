"""What the page is served: exactly what the files hold, to callers of this machine only, whatever state the folder is in."""

import http.client
import json
import urllib.parse

import pytest

from rl_core.api.errors import ConfigError
from rl_core.cli.targets import Place
from rl_core.cli.view import serve_view
from rl_core.launch.workspace import PRIVATE
from rl_core.samples.reader import SampleReader
from rl_core.view.server import ViewServer
from tests.unit.samples.kept import kept, write
from tests.unit.view.run_folder import make_run


class Browser:
    """Asks a server as a browser does."""

    def __init__(self, *folders):
        self.server = ViewServer(folders)

    def ask(self, path, *, method="GET", host=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=10)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers={"Host": host or f"localhost:{self.server.port}", **headers})
        answer = connection.getresponse()
        return answer, answer.read()

    def json(self, path, **parameters):
        answer, body = self.ask(f"/api/{path}?{urllib.parse.urlencode(parameters, doseq=True)}")
        assert answer.status == 200, body
        return json.loads(body)


@pytest.fixture
def browse():
    made = []

    def open_page(*folders):
        made.append(Browser(*folders))
        return made[-1]

    yield open_page
    for browser in made:
        browser.server.close()


@pytest.fixture
def browser(browse, tmp_path):
    return browse(make_run(tmp_path / "run"))


def test_curves_steps_and_events_are_those_of_the_files(browser):
    curves = browser.json("curves", run=0, name=["reward/mean", "val/accuracy", "unknown"])
    assert curves["series"] == {"reward/mean": [[1, 0.1], [2, 0.2], [3, 0.3]], "val/accuracy": [], "unknown": []}
    assert "time/step" in curves["names"] and curves["hours"] == [[1, 1.0], [2, 2.0], [3, 3.0]]
    assert [(event["step"], event["kind"]) for event in curves["events"]] == [(2, "failure"), (3, "restart")]
    assert browser.json("steps", run=0) == {"train": [1, 2, 3], "validation": [3]}
    (run,) = browser.json("runs")
    assert (run["name"], run["phase"], run["step"]) == ("run", "Finished", 3)


@pytest.mark.parametrize(
    ("env", "measured"),
    [
        ({"type": "math"}, "val/accuracy"),
        ({"type": "reward", "reward": "own:score"}, "val/reward_mean"),
        (None, "val/accuracy"),
    ],
    ids=["judged", "own reward", "no job"],
)
def test_the_page_is_told_whether_validation_has_an_accuracy(browser, tmp_path, env, measured):
    if env:
        (tmp_path / "run" / PRIVATE).mkdir()
        spec = {"model": {"path": "m"}, "data": {"train": "t"}, "env": env}
        job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "a"}, "spec": spec}
        (tmp_path / "run" / PRIVATE / "job.json").write_text(json.dumps(job))
    assert [run["measured"] for run in browser.json("runs")] == [measured]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, ["0-0/0", "0-0/1", "0-0/2", "0-1/0", "0-1/1", "0-1/2"]),
        ({"order": "best", "group": "0-1"}, ["0-1/2", "0-1/1", "0-1/0"]),
        ({"min_reward": "0.5", "max_reward": "1"}, ["0-0/1", "0-1/1"]),
        ({"reason": "stop"}, ["0-0/0", "0-1/0"]),
        ({"text": "ANSWER 1 2"}, ["0-1/2"]),
        ({"min_tokens": "4"}, []),
    ],
    ids=["all", "best of a group", "reward", "reason", "text", "length"],
)
def test_samples_of_a_step_are_filtered_and_ordered(browser, wanted, expected):
    found = browser.json("samples", run=0, step=2, **wanted)
    assert [f"{one['group']}/{one['sample']}" for one in found["samples"]] == expected
    assert found["reasons"] == ["length", "stop"]


def test_samples_of_filtered_groups_have_a_reason_of_their_own(browse, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    write(run, [kept("0-1", 0), kept("0-2", 0, filtered="rewards must differ")]).close()
    browser = browse(run)
    found = browser.json("samples", run=0, step=1)
    assert found["reasons"] == ["filtered", "stop"] and len(found["samples"]) == 2
    (one,) = browser.json("samples", run=0, step=1, reason="filtered")["samples"]
    assert one["group"] == "0-2"
    assert browser.json("sample", run=0, step=1, group="0-2", sample=0)["filtered"] == "rewards must differ"


def test_a_sample_is_its_line_of_the_file(browser, tmp_path):
    reader = SampleReader(tmp_path / "run")
    reader.refresh()
    line = reader.read(reader.of_step("train", 2)[4])
    assert browser.json("sample", run=0, step=2, group="0-1", sample=1) == line
    answer, body = browser.ask("/api/sample?run=0&step=2&group=0-1&sample=77")
    assert answer.status == 404 and "not kept" in json.loads(body)["error"]


def test_the_timeline_has_the_spans_of_its_step_only(browser):
    found = browser.json("timeline", run=0, step=2)
    assert (found["began"], found["ended"]) == (200.0, 210.0)
    spans = {lane["name"]: [span[0] for row in lane["rows"] for span in row] for lane in found["lanes"]}
    assert spans == {"runner": ["step"], "rollout:0": ["0-2_g0", "generate"], "actor": ["0-2"]}
    assert browser.json("timeline", run=0, step=9)["lanes"] == []


def test_only_callers_of_this_machine_are_answered(browser):
    port = browser.server.port
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1",
        f"127.0.0.1:{port + 1}",
        "",
        f"localhost:{port}.evil.example",
    ):
        answer, body = browser.ask("/api/runs", host=host or " ")
        assert answer.status == 421 and b"run" not in body.replace(b"address of the page", b""), host
    assert browser.ask("/api/runs", sec_fetch_site="cross-site")[0].status == 403
    assert browser.ask("/", sec_fetch_site="cross-site")[0].status == 200
    assert browser.ask("/api/runs", method="POST")[0].status == 405
    assert browser.ask("/api/runs", host=f"127.0.0.1:{port}")[0].status == 200


@pytest.mark.parametrize(
    "path", ["/../secret", "/static/../../x", "/%2e%2e/x", "//etc/passwd", "/status.json", "/api/nothing"]
)
def test_nothing_but_the_page_and_its_answers_is_served(browser, path):
    assert browser.ask(path)[0].status == 404


@pytest.mark.parametrize("query", ["run=1", "run=-1", "run=x", "step=1e9", "min_reward=low", "sample=" + "9" * 400])
def test_bad_parameters_are_refused(browser, query):
    assert browser.ask(f"/api/sample?{query}")[0].status in (400, 404)
    assert browser.ask("/api/samples?run=0&min_reward=low")[0].status == 400


def test_every_answer_forbids_foreign_code(browser):
    for path in ("/", "/app.js", "/view.css", "/api/runs", "/missing"):
        answer, _body = browser.ask(path)
        policy = answer.headers["Content-Security-Policy"]
        assert (
            "default-src 'none'" in policy
            and "unsafe" not in policy
            and answer.headers["X-Content-Type-Options"] == "nosniff"
        )
    scripts = [
        browser.ask(f"/{name}.js")[1].decode() for name in ("app", "charts", "dom", "samples", "timeline", "tokens")
    ]
    assert not any(
        word in script
        for script in scripts
        for word in ("innerHTML", "outerHTML", "insertAdjacent", "eval(", "document.write")
    )
    page = browser.ask("/")[1].decode()
    assert "http:" not in page and "https:" not in page and "//" not in page


def test_runs_of_equal_folder_names_are_told_apart_by_the_shortest_path(browse, tmp_path):
    folders = [make_run(tmp_path / name) for name in ("a", "b", "c")]
    nested = []
    for folder in folders[:2]:
        (folder / "x").mkdir()
        nested.append(make_run(folder / "x/out"))
    browser = browse(*nested, folders[2])
    assert [run["name"] for run in browser.json("runs")] == ["a/x/out", "b/x/out", "c"]


def test_the_reason_of_a_failure_and_the_size_of_a_step_are_told(browse, tmp_path):
    folder = make_run(tmp_path / "run")
    browser = browse(folder)
    assert browser.json("runs")[0]["groups"] is None
    status = {"phase": "Failed", "failure": {"message": "bad row"}, "promptsPerStep": 16}
    (folder / "status.json").write_text(json.dumps(status))
    (run,) = browser.json("runs")
    assert (run["failure"], run["groups"]) == ("bad row", 16)


def test_a_run_that_never_started_is_shown(browse, tmp_path):
    browser = browse(tmp_path)
    assert browser.json("runs")[0]["phase"] == "Unknown"
    assert browser.json("curves", run=0)["names"] == [] and browser.json("steps", run=0) == {
        "train": [],
        "validation": [],
    }
    assert browser.json("samples", run=0)["samples"] == [] and browser.json("timeline", run=0, step=1)["lanes"] == []


def test_damaged_files_hide_only_what_they_damage(browse, tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "status.json").write_bytes(b'{"phase": "Runn')
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n[1, 2]\n{"step": "x"}\n{"step": 4, "reward/mean": 0.4}\n{"step": 5, "rew')
    browser = browse(folder)
    assert browser.json("runs")[0]["phase"] == "Unknown"
    assert browser.json("curves", run=0, name="reward/mean")["series"]["reward/mean"][-1] == [4, 0.4]


def test_a_folder_that_grows_is_read_on(browse, tmp_path):
    browser = browse(make_run(tmp_path / "run"))
    assert browser.json("steps", run=0)["train"] == [1, 2, 3]
    write(tmp_path / "run", [kept(text="new")], step=4)
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/mean": 0.9}\n')
    assert browser.json("steps", run=0)["train"] == [1, 2, 3, 4]
    assert browser.json("samples", run=0, step=4)["samples"][0]["response"] == "new"
    assert browser.json("curves", run=0, name="reward/mean")["series"]["reward/mean"][-1] == [4, 0.9]


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        serve_view([str(tmp_path / "missing")], Place(), host="127.0.0.1", port=0, browser=False)
