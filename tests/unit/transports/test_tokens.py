"""Whose files lie in /dev/shm: names, tokens, what killed processes left, what others put there."""

import os
from hashlib import blake2b

import pytest

from rl_core.api.errors import FrameError
from rl_core.messages.rpc import MemoryProof
from rl_core.transports import tokens
from rl_core.transports.shared_memory import SegmentReader, SegmentStore
from rl_core.transports.tokens import Token, host_token, remove_orphans, shares_memory

MIB = 2**20
RANDOM = "0123456789abcdef"
SEGMENT = f"rljob-a-1-{RANDOM}-2"


class TestTokens:
    def test_who_reads_the_file_may_be_lent_to(self, tmp_path):
        token = Token("job", directory=tmp_path)
        assert shares_memory(token.proof, directory=tmp_path)
        assert not shares_memory(token.proof, directory=tmp_path / "elsewhere")
        assert not shares_memory(MemoryProof(file=token.proof.file, digest=b"0" * 64), directory=tmp_path)
        token.close()
        assert not shares_memory(token.proof, directory=tmp_path)

    @pytest.mark.parametrize("file", ["../x", SEGMENT, f"rljob-a-1-{RANDOM}-token", 1, None])
    def test_nonsense_is_not_readable(self, file, tmp_path):
        assert not shares_memory(None, directory=tmp_path)
        assert not shares_memory(MemoryProof(file=file, digest=b""), directory=tmp_path)

    def test_names_cannot_be_guessed(self, tmp_path):
        store = SegmentStore("other", directory=tmp_path, capacity=8 * MIB)
        names = [Token("job", directory=tmp_path).proof.file, store.lend(MIB, "peer").name]
        for name in names:
            random = name.split("-")[3]
            assert len(random) == 16 and set(random) <= set("0123456789abcdef")
        assert len({name.split("-")[3] for name in names}) == 2, "one job's name says nothing of another's"

    def test_the_host_token_is_equal_for_all_and_stays(self, tmp_path):
        first = host_token(directory=tmp_path)
        assert host_token(directory=tmp_path) == first and len(first) == 32
        assert [path.name for path in tmp_path.iterdir()] == [f"rljob-host-{os.geteuid()}"]


class TestOrphans:
    def test_segments_of_a_living_process_stay(self, tmp_path):
        token = Token("job", directory=tmp_path)
        store = SegmentStore("job", directory=tmp_path, capacity=8 * MIB)
        store.lend(MIB, "peer")
        assert remove_orphans(directory=tmp_path) == []
        token.close()
        store.close()

    def test_what_killed_processes_left_goes_whatever_their_job_and_pid(self, tmp_path):
        """The lock on the token tells, not the process table: another process may have the number."""
        left = [
            f"rljob-{job}-{pid}-{RANDOM}-{end}" for job, pid in (("a", 4194999), ("b", os.getpid())) for end in (1, 2)
        ]
        for name in left:
            (tmp_path / name).write_bytes(b"x")
            (tmp_path / f"{name.rpartition('-')[0]}-token").write_bytes(b"secret")
        assert sorted(remove_orphans(directory=tmp_path))[:2] == left[:2]
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("token", [None, b""], ids=["no token", "not locked yet"])
    def test_what_no_lock_speaks_for_goes_by_its_age(self, token, tmp_path):
        (tmp_path / SEGMENT).write_bytes(b"x")
        if token is not None:
            (tmp_path / f"rljob-a-1-{RANDOM}-token").write_bytes(token)
        made = (tmp_path / SEGMENT).stat().st_mtime
        assert remove_orphans(directory=tmp_path, now=lambda: made + 60) == []
        assert SEGMENT in remove_orphans(directory=tmp_path, now=lambda: made + 86_400)


def foreign(path, kind):
    """Put at `path` what is no file of this user."""
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/etc/hostname")
    else:
        path.write_text("0" * 32)
        os.chown(path, 65534, 65534)


def messages(caplog) -> list[str]:
    """Return what the module has logged in this test; transports that earlier tests left open log too."""
    return [record.getMessage() for record in caplog.records if record.name == tokens.__name__]


root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
KINDS = ["folder", "pipe", "link", pytest.param("file of another", marks=root)]


@pytest.mark.parametrize("kind", KINDS)
class TestForeignNames:
    """Others may write to /dev/shm too."""

    def test_they_are_left_alone_and_told(self, kind, tmp_path, caplog):
        caplog.set_level("INFO")
        foreign(tmp_path / SEGMENT, kind)
        (tmp_path / f"rljob-b-1-{RANDOM}-token").write_bytes(b"secret")
        assert remove_orphans(directory=tmp_path, now=lambda: 1e10) == [f"rljob-b-1-{RANDOM}-token"]
        assert os.path.lexists(tmp_path / SEGMENT)
        (message,) = messages(caplog)
        assert SEGMENT in message

    def test_as_a_token_they_end_nothing(self, kind, tmp_path):
        (tmp_path / SEGMENT).write_bytes(b"x")
        foreign(tmp_path / f"rljob-a-1-{RANDOM}-token", kind)
        assert remove_orphans(directory=tmp_path, now=lambda: 1e10) == []

    def test_they_are_no_proof_and_no_segment(self, kind, tmp_path):
        name = f"rljob-a-1-{RANDOM}-token"
        foreign(tmp_path / name, kind)
        foreign(tmp_path / SEGMENT, kind)
        assert not shares_memory(MemoryProof(file=name, digest=blake2b(b"0" * 32).digest()), directory=tmp_path)
        with pytest.raises(FrameError, match="cannot be opened"):
            SegmentReader(directory=tmp_path).view(SEGMENT, 0, 1)

    def test_where_the_host_token_should_be_they_are_not_trusted(self, kind, tmp_path, caplog):
        path = tmp_path / f"rljob-host-{os.geteuid()}"
        foreign(path, kind)
        own = host_token(directory=tmp_path)
        assert len(own) == 32 and own != "0" * 32 and host_token(directory=tmp_path) == own
        (message,) = messages(caplog)
        assert os.path.lexists(path) and "go by stream" in message
