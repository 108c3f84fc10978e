"""Operators and workers of different versions call one another: what a signature covers, and how it is written, is the same in all."""

from unittest import mock

from rl_core.plan.signatures import ANSWER, Guard, Peer, ReceivedCall, sign

PEER = Peer(token="t" * 43, uid="2f1c", epoch=3)
CALL = (
    "RLJob-HMAC uid=2f1c epoch=3 nonce=00ff challenge=abcd body=44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a "
    "mac=2701aac75a1de808a90c0c61dd7aea4b2bef4e7815a2904f58591dfbd323142f"
)
ANSWERED = "183f1e7fe2204a60f7b2e0c7f33f8caa8dd2b2ffce418fa4e236ce2f7750a849"


def test_a_call_and_its_answer_are_signed_as_in_the_first_version_that_signed():
    with mock.patch("secrets.token_hex", return_value="00ff"):
        signed = sign(PEER, "POST", "/finish", body=b"{}", challenge="abcd")
    assert signed.headers == {"Authorization": CALL}
    call = ReceivedCall.read("POST", "/finish", {"authorization": CALL})
    assert Guard(PEER).sign_answer(call, 200, b"{}") == {ANSWER: ANSWERED}
    assert signed.verify(200, {ANSWER: ANSWERED}, b"{}") == ""
