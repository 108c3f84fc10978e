"""Authentication of the runner's control port: each call and each answer is signed with the control token of the job (HMAC).

The token itself is never sent, so that another process at the address of a runner cannot learn it. A signature covers the uid of the job and
the epoch, so that calls of an operator that has lost its Lease, and calls for an earlier epoch, are refused. A call that changes something
includes a challenge from the signed answer to an earlier `GET`. A challenge is valid once, so that a recorded call cannot be replayed, and
clocks need not agree.

    caller                                   runner
    GET /status, signed          ----->
                                 <-----      status, signed; header RLJob-Challenge
    POST /finish, with it        ----->      removes the challenge, acts
                                 <-----      answer, signed
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

SCHEME = "RLJob-HMAC"
CHALLENGE, ANSWER = "RLJob-Challenge", "RLJob-Answer"
"""Headers of an answer."""
CHALLENGES = 64
CHALLENGE_SECONDS = 60.0
"""Number of challenges that a runner keeps, and their lifetime in seconds; callers use a challenge at once."""
FIELDS = ("uid", "epoch", "nonce", "challenge", "body", "mac")
"""Fields in the header of a call, in order."""
_HEADER = re.compile(rf"{SCHEME} " + " ".join(rf"{name}=([0-9A-Za-z._-]{{0,128}})" for name in FIELDS))


class NotTheRunner(Exception):
    """An answer is not signed by the runner of the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """What identifies the runner of one job in one epoch, for its callers and for itself: control token, job uid and epoch."""

    token: str
    """The job's control token."""
    uid: str
    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedCall:
    """A signed call: its headers, and the signature with which its answer is checked."""

    peer: Peer
    headers: Mapping[str, str]
    mac: str

    def verify(self, status: int, headers: Mapping[str, str], body: bytes) -> str:
        """Return the challenge of an answer. Raises NotTheRunner for one that the runner has not signed."""
        challenge = headers.get(CHALLENGE, "")
        expected = _mac(self.peer.token, "answer", self.mac, str(status), challenge, _digest(body))
        if not hmac.compare_digest(headers.get(ANSWER, "").encode(), expected.encode()):
            raise NotTheRunner(
                f"HTTP {status}: the answer must be signed by the runner of job {self.peer.uid}, epoch {self.peer.epoch}, got one "
                "that is not; another process has its address, or another version of the runner"
            )
        return challenge


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """HTTP status and message with which a call is refused."""

    status: HTTPStatus
    message: str


def sign(peer: Peer, method: str, path: str, *, body: bytes = b"", challenge: str = "") -> SignedCall:
    """Return the signed call; one that changes something needs a `challenge`."""
    fields = [peer.uid, str(peer.epoch), secrets.token_hex(16), challenge, _digest(body)]
    mac = _mac(peer.token, "call", method, path, *fields)
    parameters = " ".join(f"{name}={value}" for name, value in zip(FIELDS, [*fields, mac], strict=True))
    return SignedCall(peer=peer, headers={"Authorization": f"{SCHEME} {parameters}"}, mac=mac)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedCall:
    """A received call before any check; fields that the header lacks are empty."""

    method: str
    path: str
    uid: str = ""
    epoch: str = ""
    nonce: str = ""
    challenge: str = ""
    body: str = ""
    """Digest of the body that was signed."""
    mac: str = ""

    @classmethod
    def read(cls, method: str, path: str, headers: Mapping[str, str]) -> ReceivedCall:
        """Return the call of a request, whose header names are in lower case."""
        match = _HEADER.fullmatch(headers.get("authorization", ""))
        return cls(method=method, path=path, **dict(zip(FIELDS, match.groups() if match else (), strict=False)))

    def matches_body(self, body: bytes) -> bool:
        """Return whether `body` has the digest that was signed."""
        return hmac.compare_digest(self.body, _digest(body))

    def expected(self, token: str) -> str:
        """Return the signature that the holder of a token gives to this call."""
        fields = (self.uid, self.epoch, self.nonce, self.challenge, self.body)
        return _mac(token, "call", self.method, self.path, *fields)


class Guard:
    """Checks calls and signs answers for the runner. Not thread-safe."""

    def __init__(self, peer: Peer, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._peer, self._clock = peer, clock
        self._challenges: OrderedDict[str, float] = OrderedDict()
        """Challenge -> time at which it expires, oldest first."""

    def check(self, call: ReceivedCall) -> Refusal | None:
        """Check a call before its body is read. Returns the refusal, or None to accept the call; its challenge is then used up."""
        if not hmac.compare_digest(call.mac, call.expected(self._peer.token)):
            return Refusal(status=HTTPStatus.UNAUTHORIZED, message="a call signed with this job's token is required")
        if (call.uid, call.epoch) != (self._peer.uid, str(self._peer.epoch)):
            text = f"this is the runner of job {self._peer.uid}, epoch {self._peer.epoch}, got a call for {call.uid}, epoch {call.epoch}"
            return Refusal(status=HTTPStatus.MISDIRECTED_REQUEST, message=text)
        if call.method != "GET" and self._challenges.pop(call.challenge, 0.0) <= self._clock():
            text = "a call that changes something must quote a challenge of a recent answer, once; ask GET /status and try again"
            return Refusal(status=HTTPStatus.UNAUTHORIZED, message=text)
        return None

    def sign_answer(self, call: ReceivedCall, status: int, body: bytes) -> dict[str, str]:
        """Return the headers that prove an answer to a call; to a GET with a new challenge."""
        challenge = self._challenge() if call.method == "GET" and status < HTTPStatus.BAD_REQUEST else ""
        signed = {ANSWER: _mac(self._peer.token, "answer", call.mac, str(int(status)), challenge, _digest(body))}
        return signed | ({CHALLENGE: challenge} if challenge else {})

    def _challenge(self) -> str:
        challenge = secrets.token_hex(16)
        self._challenges[challenge] = self._clock() + CHALLENGE_SECONDS
        while len(self._challenges) > CHALLENGES:
            self._challenges.popitem(last=False)
        return challenge


def _mac(token: str, *words: str) -> str:
    """Return the signature of a list of texts without newlines; the first is the kind of message."""
    return hmac.new(token.encode(), "\n".join(words).encode(), hashlib.sha256).hexdigest()


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
