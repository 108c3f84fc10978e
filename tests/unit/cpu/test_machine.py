"""Which library multiplies matrices follows the processor's maker, as the kernel names it."""

import pytest

from rl_core.cpu import machine


@pytest.mark.parametrize(
    ("cpuinfo", "onednn"),
    [
        ("processor\t: 0\nvendor_id\t: GenuineIntel\n", False),
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\n", True),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", True),
    ],
)
def test_only_intels_processors_are_left_to_mkl(cpuinfo, onednn, tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo)
    monkeypatch.setattr(machine, "CPUINFO", path)
    assert machine.prefers_onednn.__wrapped__() is onednn


def test_a_machine_that_does_not_name_its_processor_takes_onednn(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "absent")
    assert machine.prefers_onednn.__wrapped__()
