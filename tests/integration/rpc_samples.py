"""A service to call over real sockets, and a peer that speaks the raw protocol: shared by the rpc tests."""

import asyncio
import threading
from collections import deque

import zmq

from rl_core.api.errors import (
    ConfigError,
    DataError,
)
from rl_core.api.identity import Identity
from rl_core.messages.rpc import Hello
from rl_core.transports import frames
from rl_core.transports.message_batches import unbatched
from rl_core.transports.rpc import current_caller


def identity(role, *, rank=0, epoch=0, uid="u1", attempt=0):
    return Identity(
        job="j", namespace="n", uid=uid, epoch=epoch, role=role, pod=f"j-{role}-{rank}", pod_index=rank, group=role, rank=rank,
        world_size=1, attempt=attempt,
    )  # fmt: skip


class Mute(Exception):
    """An error that cannot be shown."""

    def __str__(self):
        raise RuntimeError("nothing to say")


class Service:
    """Handlers of all kinds."""

    def __init__(self):
        self.started = threading.Event()
        self.cancelled = threading.Event()
        self.release = threading.Event()
        self.runs = 0
        self.threads = set()

    def add(self, a, b=0):
        return a + b

    async def add_async(self, a, b=0):
        await asyncio.sleep(0)
        return a + b

    def add_later(self, a, b):
        return self.add_async(a, b)

    def echo(self, value):
        return value

    def raise_error(self, kind, text):
        if kind == "undecodable":  # half a character, as in the name of a file
            raise DataError(f"{text}\udcff")
        if kind == "huge":  # more than a message may hold
            raise ValueError(text * (70 << 20))
        kinds = {"data": DataError, "config": ConfigError, "value": ValueError, "exit": SystemExit, "mute": Mute}
        raise kinds[kind](text)

    def unsendable(self):
        return object()

    def block(self):
        self.runs += 1
        self.started.set()
        self.release.wait(60)
        return self.runs

    async def hang(self):
        self.started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def who(self):
        return current_caller()

    def remember_thread(self):
        self.threads.add(threading.current_thread().name)

    def nbytes(self, array):
        return array.nbytes

    def _private(self):
        return "secret"


class RawPeer:
    """A DEALER that speaks the protocol by hand, to send what our client never would."""

    def __init__(self, address):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(address)
        self.received = deque()

    def send(self, kind, obj, number=None, *, epoch=None, method=None, options=None):
        self.socket.send_multipart(self.encode(kind, obj, number, epoch=epoch, method=method, options=options))

    def encode(self, kind, obj, number=None, *, epoch=None, method=None, options=None):
        return frames.encode_message(
            kind, obj, epoch=epoch, request_id=number, sender=None, method=method, options=options
        )

    def receive(self, *kinds):
        while True:
            if not self.received:
                assert self.socket.poll(60_000), "no answer"
                self.received.extend(unbatched(self.socket.recv_multipart(copy=False)))
            message = frames.decode_message(self.received.popleft())
            if message.kind in kinds:
                return message

    def hello(self, caller=None, pending=()):
        self.send("hello", Hello(caller=caller, memory=None, pending=pending))
        return self.receive("welcome", "refused")

    def close(self):
        self.socket.close(0)
        self.context.term()
