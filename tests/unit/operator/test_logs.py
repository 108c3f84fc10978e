"""Log lines say which job, epoch and reconcile they belong to."""

import asyncio
import json
import logging

from rljob_operator.runtime import logs


def line(form, message="words", **more):
    record = logging.LogRecord("rljob_operator.x", logging.WARNING, __file__, 1, message, (), more.get("exc_info"))
    return form.format(record)


def test_a_line_is_one_json_object_with_its_context():
    with logs.context(job="ns/x", epoch=2, reconcile="abc"):
        got = json.loads(line(logs.JsonFormatter()))
    assert (got["job"], got["epoch"], got["reconcile"], got["message"], got["level"]) == (
        "ns/x",
        2,
        "abc",
        "words",
        "WARNING",
    )
    assert "job" not in json.loads(line(logs.JsonFormatter()))


def test_a_traceback_stays_in_its_line():
    try:
        raise ValueError("why")
    except ValueError as error:
        text = line(logs.JsonFormatter(), exc_info=(ValueError, error, error.__traceback__))
    assert "\n" not in text and "ValueError: why" in json.loads(text)["traceback"]


def test_contexts_of_tasks_do_not_mix():
    async def one(name):
        with logs.context(job=name):
            await asyncio.sleep(0)
            return json.loads(line(logs.JsonFormatter()))["job"]

    async def scenario():
        assert await asyncio.gather(one("a"), one("b")) == ["a", "b"]

    asyncio.run(scenario())


def test_text_lines_name_the_job():
    with logs.context(job="ns/x", epoch=1):
        assert "[ns/x 1] words" in line(logs.TextFormatter())
    assert "[" not in line(logs.TextFormatter())
