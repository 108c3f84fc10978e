"""Runners of tenants on all loopback addresses: most answer as they should, one in twenty in the worst ways. Prints `ready`."""

import asyncio
import itertools
import json
import sys

from _fake_api import MASTER
from _fake_runner import PORT, STATUS

from rl_core.plan import keys
from rl_core.plan.signatures import Guard, Peer, ReceivedCall

HOSTILE_EVERY = 20
BACKLOG = 1024
KINDS = ("silent", "endless", "nested", "slow", "bloated")
LONG_STATUS = STATUS | {
    "members": [{"pod": f"job-rollout-{n}", "state": "serving", "policyVersion": 1} for n in range(200)]
}
"""Some 15 KiB: several TCP segments."""
BLOATED = b'{"members": [' + b",".join([b"{}"] * 340_000) + b"]}"
"""As long as an answer may be; more than 20 MiB as Python objects."""
BAD = b"HTTP/1.1 200 OK\r\n\r\n"


def kind_of(index: int) -> str:
    """How the runner of a job answers."""
    return KINDS[index // HOSTILE_EVERY % len(KINDS)] if index % HOSTILE_EVERY == 0 else "good"


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one call as the runner of the address does."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head.split("\r\n")[1:])}
        call = ReceivedCall.read("GET", "/status", headers)
        await answer(kind_of(int(call.uid)), call, writer)
        await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def answer(kind: str, call: ReceivedCall, writer: asyncio.StreamWriter) -> None:
    guard = Guard(Peer(token=keys.control_token(MASTER, call.uid), uid=call.uid, epoch=1))
    bodies = {"nested": b"[" * 500_000, "bloated": BLOATED}
    body = bodies.get(kind) or json.dumps(LONG_STATUS).encode()
    signed = "".join(f"{name}: {value}\r\n" for name, value in guard.sign_answer(call, 200, body).items())
    whole = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n{signed}\r\n".encode() + body
    if kind in ("good", "nested", "bloated"):
        writer.write(whole)
    elif kind == "silent":
        await asyncio.sleep(600)
    elif kind == "endless":
        writer.write(BAD)
        while True:
            writer.write(b" " * 65536)
            await writer.drain()
    else:
        for position in itertools.count():  # a byte now and then
            writer.write(whole[position : position + 1])
            await writer.drain()
            await asyncio.sleep(0.5)


async def main() -> None:
    server = await asyncio.start_server(serve, "0.0.0.0", PORT, backlog=BACKLOG)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
