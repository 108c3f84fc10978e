"""What user code prints: all of it up to a bound per window, then a count."""

from rl_core.envs.output import BoundedOutput


def test_output_beyond_the_bound_of_a_window_is_counted_and_told():
    now, written = [0.0], []
    output = BoundedOutput(written.append, most=10, window=60.0, clock=lambda: now[0])
    output.take(b"12345678")
    output.take(b"90abcdef")
    output.take(b"x" * 100)
    assert b"".join(written) == b"1234567890"
    now[0] = 60.0
    output.take(b"again")
    assert b"".join(written[2:]) == b"\nenv child: 106 bytes of output are left out: at most 10 in 60 s\nagain"
    output.report_omitted()
    assert written[-1] == b"again", "nothing more was left out"
