"""A stranger on the host who holds no key: on command it offers connections to ports and sends what costs a server most.

    _unauthenticated.py CONNECTIONS PORT ...

Reads `on` and `off` from standard input; answers each with a line of JSON: connections made since the last word, bytes sent, and its
own processor seconds. A connection that the server ends is offered again a second later.
"""

import asyncio
import contextlib
import json
import sys
import time

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
FRAME = b"\x06"
LARGE, ABSURD = (4 << 20).to_bytes(8, "big"), (1 << 62).to_bytes(8, "big")
HTTP = b"POST /finish HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n"
KINDS: tuple[tuple[bytes, bytes], ...] = (
    (b"", b""),
    (GREETING[:1], b"\0"),
    (GREETING + FRAME + LARGE + bytes(1 << 16), bytes(1 << 10)),
    (GREETING + FRAME + ABSURD + bytes(1 << 16), bytes(1 << 10)),
    (HTTP, b"{"),
)
"""What is sent first, and then every PAUSE: nothing, a slow greeting, a frame as large as is taken, one of any size, a slow body."""
PAUSE = 0.2


class Attack:
    """All connections and what they came to."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []
        self.made = self.sent = 0

    def begin(self, connections: int, ports: list[int]) -> None:
        """Offer all connections, port by port in turn."""
        chosen = (
            (ports[number % len(ports)], KINDS[number // len(ports) % len(KINDS)]) for number in range(connections)
        )
        self.tasks = [asyncio.create_task(self.hold(*each)) for each in chosen]

    async def end(self) -> None:
        """Close all connections."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def hold(self, port: int, kind: tuple[bytes, bytes]) -> None:
        """Keep one connection as long as the server does, and offer another then."""
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                self.made += 1
                try:
                    await self.send(reader, writer, *kind)
                finally:
                    writer.transport.abort()
            await asyncio.sleep(1.0)

    async def send(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes, then: bytes) -> None:
        """Send until the server ends the connection."""
        writer.write(first)
        self.sent += len(first)
        while not reader.at_eof():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE):
                    await reader.read(1 << 16)
                    continue
            writer.write(then)
            self.sent += len(then)
            await writer.drain()


async def main() -> None:
    """Do what standard input says."""
    connections, ports = int(sys.argv[1]), [int(word) for word in sys.argv[2:]]
    attack, used = Attack(), time.process_time()
    while word := (await asyncio.to_thread(sys.stdin.readline)).strip():
        if word == "on":
            attack.begin(connections, ports)
        else:
            await attack.end()
        told = {
            "connections_made": attack.made,
            "mb_sent": round(attack.sent / 1e6, 1),
            "processor_s": round(time.process_time() - used, 2),
        }
        print(json.dumps(told), flush=True)
        attack.made = attack.sent = 0
        used = time.process_time()


if __name__ == "__main__":
    asyncio.run(main())
