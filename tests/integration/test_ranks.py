"""Ranks over real processes: who talks with whom when the model is cut too, and what they listen on."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rl_core.launch.ports import free_ports

CHILD = Path(__file__).parent / "rank_child.py"


def own_address():
    """Return an IPv4 address of this machine, of the network if it has one."""
    held = [a.address for found in psutil.net_if_addrs().values() for a in found if a.family == socket.AF_INET]
    return next((address for address in held if not address.startswith("127.")), "127.0.0.1")


def run(folder, *, data, tensor, address="127.0.0.1"):
    environment = os.environ | {"MASTER_ADDR": address, "MASTER_PORT": str(free_ports().master), "OMP_NUM_THREADS": "1"}
    environment.pop("GLOO_SOCKET_IFNAME", None)
    outs = [folder / f"{rank}.json" for rank in range(data * tensor)]
    commands = [[sys.executable, str(CHILD), str(r), str(data), str(tensor), str(out)] for r, out in enumerate(outs)]
    processes = [subprocess.Popen(command, env=environment) for command in commands]
    try:
        assert [process.wait(timeout=300) for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()
    return [json.loads(out.read_text()) for out in outs]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Two data ranks of two tensor ranks each, on the machine's network."""
    return run(tmp_path_factory.mktemp("four"), data=2, tensor=2, address=own_address())


def test_rows_are_summed_and_moved_among_the_ranks_that_hold_the_same_part_of_the_model(four):
    assert [seen["sum"] for seen in four] == [101.0, 1010.0, 101.0, 1010.0]
    assert [seen["rows"] for seen in four] == [["of 0", "of 2"], ["of 1", "of 3"]] * 2
    assert [seen["exchanged"] for seen in four] == [[0, 20], [10, 30], [1, 21], [11, 31]]


def test_every_rank_hears_of_all(four):
    assert all(seen["all"] == [0, 1, 2, 3] and seen["largest"] == 3 for seen in four)


def test_ranks_wait_for_a_late_one_where_they_have_time_and_only_there(four):
    assert [seen["late"] for seen in four[1:]] == [True] * 3


def test_ranks_listen_on_the_network_they_meet_on_and_on_no_other(four):
    assert {address for seen in four for address in seen["listening"]} == {own_address()}


def test_ranks_may_open_as_many_files_as_the_system_allows(four):
    assert all(seen["files"] for seen in four)


def test_a_single_rank_has_no_process_group_and_one_that_a_wrapper_asks_for_stays_on_loopback(tmp_path):
    (seen,) = run(tmp_path, data=1, tensor=1)
    assert not seen["grouped"] and seen["mesh"] == 1
    assert (seen["sum"], seen["rows"], seen["all"], seen["exchanged"]) == (1.0, ["of 0"], [0], [0])
    assert set(seen["listening"]) <= {"127.0.0.1"}
