"""Imported by every process of a traced run: writes down each file of ours that is handed a prompt group while the switch is on.

A group is recognised by its forms: the records and batches below, a prompt of the data set, the messages of a log. Numbers and bare
tensors made of it are not the group any more: what computes on them may be read by itself.
"""

import mmap
import os
import sys
import threading

FOLDER = os.environ.get("RLJOB_TEST_TRACE", "")
FORMS = frozenset(
    [
        "PromptLease",
        "PromptGroupRecord",
        "Completion",
        "GroupEntry",
        "EnvironmentReturn",
        "EnvRow",
        "EnvRows",
        "EnvAnswer",
        "StepRowsRequest",
        "StepRowsAnswer",
        "Row",
        "GenerationOutput",
        "BatchedDataDict",
        "Episode",
        "TrainingBatch",
        "PreparedBatch",
        "StepRows",
        "PackedBatch",
        "StepState",
        "TrainedGroup",
    ]
)


def is_group(value, depth=2):
    """Return whether a value is a group in one of its forms, or a collection of them."""
    if type(value).__name__ in FORMS:
        return True
    if isinstance(value, dict):
        return bool({"message_log", "token_ids", "lease_token"} & value.keys())
    return depth > 0 and isinstance(value, list | tuple) and bool(value) and is_group(value[0], depth - 1)


def trace(folder):
    """Look at calls from here on, in this thread and in those that start later."""
    switch = os.open(f"{folder}/switch", os.O_RDONLY)
    on = mmap.mmap(switch, 1, prot=mmap.PROT_READ)
    log = os.open(f"{folder}/{os.getpid()}.files", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    seen = set()

    def note(frame, event, arg):
        name = frame.f_code.co_filename
        if event != "call" or on[0] != 49 or name in seen or "/rl_core/" not in name:
            return
        count = frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
        values = frame.f_locals
        if any(is_group(values.get(argument)) for argument in frame.f_code.co_varnames[:count]):
            seen.add(name)
            os.write(log, f"{name}\n".encode())

    sys.setprofile(note)
    threading.setprofile(note)


if FOLDER:
    trace(FOLDER)
