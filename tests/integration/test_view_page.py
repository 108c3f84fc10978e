"""The page in a real browser: it shows what the files hold, and runs nothing that a sample contains."""

import html
import json
import re
import shutil
import subprocess
import urllib.parse

import numpy as np
import pytest

from rl_core.view.server import ViewServer
from tests.unit.samples.kept import kept, write
from tests.unit.view.run_folder import make_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs chromium on the PATH (Debian: apt-get install chromium)"
)
HOSTILE = (
    "<script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\"><b>bold</b> &amp; \x1b[31mred\x07 "
    "\u202eright to left\u2069 \u05e9\u05dc\u05d5\u05dd \ud800 javascript:alert(1) end"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return a function that opens the page of some runs at a state and returns its elements as HTML."""
    folder = tmp_path_factory.mktemp("runs")
    run = make_run(folder / "first")
    write(
        run,
        [kept("0-9", 0, text=HOSTILE, role="<i>role"), kept("0-9", 1, text="x" * 10**6 + " last", reward=1.0)],
        step=4,
    ).close()
    trainer = np.array([np.nan, np.nan, -0.123456, -2.5, -1e-5], np.float32)
    from rl_core.samples.writer import SampleWriter
    from tests.unit.samples.kept import line

    SampleWriter(run / "samples", limit=10**9).write(
        [
            line(kept("0-8", 0), step=4, trainer=trainer),
            line(kept("0-7", 0, filtered="rewards must differ"), step=4),
        ],
        name="e0000-s0000009",
    )
    never = folder / "never"
    never.mkdir()
    (never / "status.json").write_text(
        json.dumps({"phase": "Failed", "failure": {"message": "<b>bad row</b> train.jsonl"}})
    )
    status = json.loads((run / "status.json").read_text()) | {"promptsPerStep": 16}
    (run / "status.json").write_text(json.dumps(status))
    second = make_run(folder / "second", text="other")
    write(second, [kept("0-0", 0, reward=float("nan"), reason="error")], step=0).close()
    server = ViewServer([run, second, never])

    def open_page(**state):
        address = f"{server.url}#{urllib.parse.urlencode(state)}"
        command = [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}",
            "--virtual-time-budget=5000", "--dump-dom", address,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, timeout=120)
        return done.stdout.decode(errors="replace")

    yield open_page
    server.close()


def texts(dom, pattern):
    return [html.unescape(found) for found in re.findall(pattern, dom, re.DOTALL)]


def test_curves_of_all_runs_and_the_groups_of_the_newest_step_are_shown(page):
    dom = page()
    assert texts(dom, r'class="phase [a-z]*">([^<]*)<') == ["Finished", "Finished", "Failed"]
    assert 'class="line run0"' in dom and 'class="line run1"' in dom and 'class="event failure"' in dom
    assert texts(dom, r'class="name">([^<]*)<') == ["group 0-9", "group 0-8", "group 0-7"]
    assert dom.count("filtered, not trained") == 1
    assert "2 of 16 groups are kept (samples.groups)" in dom
    assert texts(dom, r'<i class="run1"></i>([^<]*)</button>') == [
        "second, step 2: rollout/worker_lost: 1 more",
        "second, step 3: restarted, attempt 1",
    ]
    assert '<b class="run0">' in dom and '<b class="run1">' in dom


def test_the_reason_of_a_failed_run_is_on_the_page_as_text(page):
    dom = page(run=2)
    assert "never failed: &lt;b&gt;bad row&lt;/b&gt; train.jsonl</p>" in dom


def test_nothing_in_a_sample_is_run_or_rendered(page):
    dom = page(step=4, group="0-9", sample=0)
    assert "<title>rljob view</title>" in dom and "<img" not in dom and "<b>bold" not in dom and "<i>role" not in dom
    (shown,) = (text for text in texts(dom, r'<pre class="text"[^>]*>([^<]*)</pre>') if "bold" in text)
    assert "<script>document.title='ran'</script>" in shown and "\u241b[31mred\u2407" in shown
    assert "\u27e8202e\u27e9right" in shown and "\u27e8d800\u27e9" in shown and "\u05e9\u05dc\u05d5\u05dd" in shown


def test_tokens_show_the_numbers_of_the_file(page):
    dom = page(step=4, group="0-8", sample=0, tab="tokens", colour="trainer")
    tokens = re.findall(r'<span class="token[^"]*" data-at="(\d)"(?: data-value="([^"]*)")?', dom)
    assert [at for at, _ in tokens] == list("01234") and [value for _, value in tokens[:2]] == ["", ""]
    assert [float(value) for _, value in tokens[2:]] == pytest.approx([-0.123456, -2.5, -1e-5], rel=1e-2, abs=1e-6)
    assert tokens[2][1] == "-0.123456"


def test_a_group_stands_side_by_side_and_a_long_sample_is_cut_until_asked_for(page):
    dom = page(step=4, group="0-9")
    assert dom.count('<article class="column">') == 2 and "show all 1,000,005 characters" in dom and len(dom) < 500_000


def test_filters_of_a_link_apply(page):
    dom = page(run=1, step=2, text="other 1 2")
    assert texts(dom, r'class="name">([^<]*)<') == ["group 0-1"] and dom.count('class="reward r2"') == 1


def test_a_filtered_group_is_found_by_its_reason_and_says_why(page):
    assert texts(page(step=4, reason="filtered"), r'class="name">([^<]*)<') == ["group 0-7"]
    assert '<dt>filtered</dt><dd dir="auto">rewards must differ</dd>' in page(step=4, group="0-7", sample=0)


def test_who_waited_is_drawn_and_a_run_that_never_started_says_so(page):
    assert 'class="span work"' in page(step=2, time=1)
    assert "No samples are kept" in page(run=2)


def test_failures_before_the_first_step_are_headed_so(page):
    assert texts(page(run=1, step=0), r"<h2>([^<]*step[^<]*)<") == ["Before step 1"]
    assert texts(page(run=1, step=1), r"<h2>([^<]*tep[^<]*)<") == ["Step 1"]
