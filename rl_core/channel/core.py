"""The rules of a channel without any I/O: keyed FIFO queues, waiting puts and takes, leases, closing (runtime.md 5).

`server` and `local` drive it: they call the verbs from one thread (or under one lock), pass the present time, and are told
of results by callbacks. Payloads are opaque. Invariants: items of a key stand in the order of their first acceptance;
while takes wait on a key its queue is empty; a take is one transaction, its items go back in order when it fails; a key
that holds nothing is forgotten, so that no verb but `close` and `client_lost` walks the keys.
"""

import heapq
import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from rl_core.api.errors import ChannelClosed, ChannelEmpty, ChannelFull, DeadlineExceeded, ProducerLost
from rl_core.channel.model import ChannelOptions, Client, Delivered, Item, Key, KeyQueue, Put, Take
from rl_core.channel.waiting import Waiting

MANY_BYTES = 32 * 2**20
"""Most payload bytes that one take of several leases gets (one item always): its answer is one message."""


class ChannelCore:
    """One channel. Every verb takes `now` (seconds on one clock) first; `tick` does what time brings.

    `on_drop(payload)` is called once for each payload that leaves the channel for good.
    """

    def __init__(
        self, name: str, options: ChannelOptions, *, on_drop: Callable[[Any], None] = lambda payload: None
    ) -> None:
        self.name = name
        self.options = options
        self.counters: Counter[str] = Counter()
        """puts, gets, redelivered, expired, dead, stale_acks."""
        self.put_wait_seconds = 0.0
        self.bytes = 0
        self.dead: dict[str, Item] = {}
        self.producers: dict[tuple[Client, int], str] = {}
        """Who is registered and not done, by client and number of the registration: a process may have several producers."""
        self._lost_producers: list[str] = []
        self._on_drop = on_drop
        self._keys: dict[Key, KeyQueue] = {}
        self._waiting = Waiting()
        self._short_of_bytes: dict[Key, KeyQueue] = {}
        """Where puts wait, perhaps for bytes that are freed by another key."""
        self._out: dict[str, Delivered] = {}
        self._delayed: list[tuple[float, int, Item]] = []
        self._closed = False
        self._error: Exception | None = None
        self._numbers = itertools.count()
        self._tokens = itertools.count()
        self._prefix = secrets.token_hex(4)

    # --- putting ---

    def put(self, now: float, put: Put, *, nowait: bool = False) -> None:
        """Admit `put` in order: `on_room` when there is room, `on_error` on deadline or close. ChannelFull with `nowait`.

        Raises ValueError for what is larger than the whole channel.
        """
        self.options.check_fits(self.name, put.sizes)
        queue = self._queue(put.key)
        if self._is_closed(queue):
            put.on_error(self._refused(put.key, queue))
        elif nowait and (queue.puts or not self._has_room(queue, put.nbytes, len(put.sizes))):
            put.on_error(ChannelFull(f"channel {self.name!r} key {put.key!r} is full: {self._depth_text(queue)}"))
        else:
            queue.puts.append(put)
            self._pump(now, put.key, queue)
            if put.waits:
                self._waiting.add(put)
                if self.options.max_bytes is not None:
                    self._short_of_bytes[put.key] = queue
        self._forget_idle(put.key, queue)

    def store(self, now: float, put: Put, contents: Iterable[tuple[Any, float]]) -> None:
        """Accept the (payload, weight) of each item of an admitted put. Raises ChannelClosed when the key was closed meanwhile."""
        queue = self._queue(put.key)
        if not put.admitted or not put.open:
            raise ChannelClosed(f"the room for this item in channel {self.name!r} key {put.key!r} was given up")
        put.open = False
        queue.reserved -= len(put.sizes)
        if self._is_closed(queue):
            self.bytes -= put.nbytes
            self._pump_freed(now, put.key)
            raise self._refused(put.key, queue)
        for nbytes, (payload, weight) in zip(put.sizes, contents, strict=True):
            queue.items.append(Item(next(self._numbers), put.key, payload, nbytes, weight, now))
        self.counters["puts"] += len(put.sizes)
        self.put_wait_seconds += now - put.since
        self._pump(now, put.key, queue)

    def cancel_put(self, now: float, put: Put) -> None:
        """Forget a waiting put, or give up the room of an admitted one."""
        if not put.open:
            return
        put.open = False
        queue = self._queue(put.key)
        if put.admitted:
            queue.reserved -= len(put.sizes)
            self.bytes -= put.nbytes
        else:
            queue.puts.remove(put)
        self._pump_freed(now, put.key)

    # --- taking ---

    def take(self, now: float, take: Take, *, nowait: bool = False) -> None:
        """Serve `take` in order: `on_items` when it is complete, `on_error` on deadline or close. ChannelEmpty with `nowait`."""
        queue = self._queue(take.key)
        queue.takes.append(take)
        self._pump(now, take.key, queue)
        if nowait and take.open:
            self._withdraw(take, queue)
            take.on_error(ChannelEmpty(f"channel {self.name!r} key {take.key!r} is empty: {self._depth_text(queue)}"))
            self._pump(now, take.key, queue)
        elif take.open:
            self._waiting.add(take)

    def cancel_take(self, now: float, take: Take) -> None:
        """Forget a waiting take, or return what a finished one has not confirmed, to the head, uncounted."""
        queue = self._queue(take.key)
        if take.open:
            self._withdraw(take, queue)
        for delivered in list(take.delivered):
            self._return(now, delivered, lost=False)
        self._pump_freed(now, take.key)

    def confirm(self, now: float, tokens: Iterable[str]) -> None:
        """Delete what `get` delivered: the consumer has it."""
        keys = []
        for token in tokens:
            delivered = self._out.get(token)
            if delivered is not None and delivered.expires is None:
                self._delete(delivered)
                keys.append(delivered.item.key)
        self._pump_freed(now, *keys)

    def ack(self, now: float, token: str) -> bool:
        """Delete a leased or dead item; False (counted) when the token is stale."""
        dead = self.dead.pop(token, None)
        if dead is not None:
            self._on_drop(dead.payload)
            return True
        delivered = self._current(token)
        if delivered is None:
            return False
        self._delete(delivered)
        self._pump_freed(now, delivered.item.key)
        return True

    def nack(self, now: float, token: str, *, delay: float = 0.0, lost: bool = False) -> bool:
        """Return a leased or dead item to its place after `delay` seconds; `lost` counts as a lost consumer."""
        dead = self.dead.pop(token, None)
        if dead is not None:
            dead.attempt = 1
            self.bytes += dead.nbytes
            self._back(now, dead, delay)
            self._pump_freed(now, dead.key)
            return True
        delivered = self._current(token)
        if delivered is None:
            return False
        self._return(now, delivered, lost=lost, delay=delay)
        self._pump_freed(now, delivered.item.key)
        return True

    def extend(self, now: float, tokens: Iterable[str], seconds: float | None = None) -> list[str]:
        """Let leases run for `seconds` (None = lease_seconds) from now, never shorter; return the stale tokens."""
        stale = []
        for token in tokens:
            delivered = self._out.get(token)
            if delivered is None or delivered.expires is None:
                stale.append(token)
            else:
                delivered.expires = max(
                    delivered.expires, now + (self.options.lease_seconds if seconds is None else seconds)
                )
        return stale

    # --- clients and the end ---

    def register_producer(self, client: Client, registration: int = 0) -> None:
        """Add a producer; the channel closes when all have finished. Raises ChannelClosed afterwards.

        `registration` is the client's own number of it: the same one twice, as a repeated message brings it, counts once.
        """
        if self._closed:
            raise ChannelClosed(f"channel {self.name!r} is closed; no producer can join")
        self.producers[client, registration] = client.name

    def done_producing(self, now: float, client: Client, registration: int = 0) -> None:
        """Mark a producer as finished."""
        if self.producers.pop((client, registration), None) is not None:
            self._close_if_done(now)

    def client_lost(self, now: float, client: Client) -> None:
        """Return all that `client` holds, forget its waits; a lost producer counts as finished with an error."""
        for queue in self._keys.values():
            for take in [take for take in queue.takes if take.client is client]:
                self._withdraw(take, queue)
            for put in [put for put in queue.puts if put.client is client]:
                put.open = False
                queue.puts.remove(put)
        for delivered in [delivered for delivered in self._out.values() if delivered.client is client]:
            self._return(now, delivered, lost=True)
        lost = [producer for producer in self.producers if producer[0] is client]
        for producer in lost:
            del self.producers[producer]
        if lost:
            self._lost_producers.append(client.name)
            self._close_if_done(now)
        self._pump_all(now)

    def close(self, now: float, key: Key | None = None, error: Exception | None = None) -> None:
        """Refuse later puts of `key` (None = all); stored items are still delivered, then takes end. The first error counts."""
        if key is None and not self._closed:
            self._closed, self._error = True, error
        elif key is not None and not self._queue(key).closed:
            queue = self._queue(key)
            queue.closed, queue.error = True, error
        for name, queue in self._keys.items():
            if self._is_closed(queue):
                for put in list(queue.puts):
                    put.open = False
                    put.on_error(self._refused(name, queue))
                queue.puts.clear()
        self._pump_all(now)

    # --- time ---

    def tick(self, now: float) -> None:
        """Do what is due: expired leases, delayed returns, deadlines of waiting puts and takes."""
        returned = []
        for delivered in [entry for entry in self._out.values() if entry.expires is not None and entry.expires <= now]:
            self.counters["expired"] += 1
            self._return(now, delivered, lost=True)
            returned.append(delivered.item.key)
        while self._delayed and self._delayed[0][0] <= now:
            item = heapq.heappop(self._delayed)[2]
            queue = self._queue(item.key)
            queue.delayed -= 1
            queue.insert([item])
            returned.append(item.key)
        self._pump_freed(now, *returned)  # when all are back: the oldest goes out first
        for operation in self._waiting.pop_overdue(now):
            if operation.waits:  # else an error handed out before it has made room for this one
                self._time_out(now, operation)

    def _time_out(self, now: float, operation: Put | Take) -> None:
        key, queue = operation.key, self._queue(operation.key)
        if isinstance(operation, Put):
            operation.open = False
            queue.puts.remove(operation)
            what = "put on"
        else:
            self._withdraw(operation, queue)
            what = f"{operation.kind} from"
        operation.on_error(DeadlineExceeded(self._waited(what, key, queue, now - operation.since)))
        self._pump(now, key, queue)

    def next_due(self) -> float:
        """Return when `tick` has something to do; infinity = never as things stand."""
        due = [entry.expires for entry in self._out.values() if entry.expires is not None]
        if self._delayed:
            due.append(self._delayed[0][0])
        return min([*due, self._waiting.next_deadline()])

    # --- looking ---

    def depth(self, key: Key) -> int:
        """Return the stored items of `key`; 0 for an unknown key. Items on lease or held by a batch do not count."""
        queue = self._keys.get(key)
        return len(queue.items) if queue is not None else 0

    def is_full(self, key: Key) -> bool:
        """Return whether a put of one byte would wait; False for an unknown key."""
        queue = self._keys.get(key)
        return queue is not None and not self._has_room(queue, 1)

    def dead_items(self, key: Key) -> list[tuple[str, Item]]:
        """Return (token, item) of the dead list of `key`."""
        return [(token, item) for token, item in self.dead.items() if item.key == key]

    def stats(self, now: float) -> dict[str, Any]:
        """Return depth, bytes and age of each key in use, and the counters; never payloads."""
        keys = {
            key: {
                "depth": len(queue.items),
                "bytes": sum(item.nbytes for item in queue.items),
                "oldest_age_seconds": now - queue.items[0].stored_at if queue.items else 0.0,
                "waiters": len(queue.takes),
            }
            for key, queue in self._keys.items()
        }
        return {
            "name": self.name,
            "keys": keys,
            "bytes": self.bytes,
            "leases": sum(entry.expires is not None for entry in self._out.values()),
            "dead_items": len(self.dead),
            "producers": list(dict.fromkeys(self.producers.values())),
            "closed": self._closed,
            "put_wait_seconds": self.put_wait_seconds,
            **{name: self.counters[name] for name in ("puts", "gets", "redelivered", "expired", "dead", "stale_acks")},
        }

    # --- inside ---

    def _queue(self, key: Key) -> KeyQueue:
        queue = self._keys.get(key)
        if queue is None:
            queue = self._keys[key] = KeyQueue()
        return queue

    def _is_closed(self, queue: KeyQueue) -> bool:
        return self._closed or queue.closed

    def _has_room(self, queue: KeyQueue, nbytes: int, items: int = 1) -> bool:
        options = self.options
        if options.maxsize and len(queue.items) + queue.reserved + items > options.maxsize:
            return False
        return options.max_bytes is None or self.bytes + nbytes <= options.max_bytes

    def _pump_freed(self, now: float, *keys: Key) -> None:
        """Move what waits on `keys`, where items or room came back, and puts of other keys that the freed bytes let in."""
        for key in keys:
            self._pump(now, key, self._queue(key))
        for key, queue in list(self._short_of_bytes.items()):
            self._pump(now, key, queue)
            if not queue.puts and self._short_of_bytes.get(key) is queue:
                del self._short_of_bytes[key]

    def _pump_all(self, now: float) -> None:
        for key, queue in list(self._keys.items()):
            self._pump(now, key, queue)

    def _pump(self, now: float, key: Key, queue: KeyQueue) -> None:
        """Let waiting puts in and waiting takes out until neither moves."""
        if queue.pumping:  # from a callback; a loop per put that waits would nest as deep as there are puts
            return
        queue.pumping = True
        try:
            while self._let_in(queue) or self._let_out(now, key, queue):
                pass
        finally:
            queue.pumping = False
        self._forget_idle(key, queue)

    def _forget_idle(self, key: Key, queue: KeyQueue) -> None:
        if queue.is_idle and self._keys.get(key) is queue:
            del self._keys[key]

    def _let_in(self, queue: KeyQueue) -> bool:
        """Give waiting puts the room there is; return whether one got any."""
        moved = False
        while queue.puts and self._has_room(queue, queue.puts[0].nbytes, len(queue.puts[0].sizes)):
            put = queue.puts.popleft()
            put.admitted = True
            queue.reserved += len(put.sizes)
            self.bytes += put.nbytes
            put.on_room(put)
            moved = True
        return moved

    def _let_out(self, now: float, key: Key, queue: KeyQueue) -> bool:
        """Serve waiting takes; return whether anything moved."""
        moved = False
        while queue.takes and self._serve(now, key, queue, queue.takes[0]):
            moved = True
        return moved

    def _serve(self, now: float, key: Key, queue: KeyQueue, take: Take) -> bool:
        """Give the first waiting take what there is; True when that ended it or took something."""
        before = len(take.held)
        if self._complete(queue, take) or (take.held and self._is_closed(queue)):
            queue.takes.popleft()
            self._hand_out(now, take)
            return True
        if self._is_closed(queue) and self._drained_for(take.client, queue, key):
            queue.takes.popleft()
            take.open = False
            take.on_error(self._end(key, queue))
            return True
        return len(take.held) > before

    def _complete(self, queue: KeyQueue, take: Take) -> bool:
        if take.kind != "batch":
            room = MANY_BYTES
            while queue.items and len(take.held) < take.most and (not take.held or queue.items[0].nbytes <= room):
                room -= queue.items[0].nbytes
                take.held.append(queue.items.popleft())
            return bool(take.held)
        while queue.items:
            head = queue.items[0]
            if not take.fits(head):
                if take.allow_oversize and not take.held:
                    take.hold(queue.items.popleft())
                return True
            take.hold(queue.items.popleft())
            if take.is_full:
                return True
        return False

    def _hand_out(self, now: float, take: Take) -> None:
        expires = now + self.options.lease_seconds if take.kind == "lease" else None
        for item in take.held:
            delivered = Delivered(f"{self._prefix}-{next(self._tokens)}", item, take.client, take, expires)
            self._out[delivered.token] = delivered
            take.delivered.append(delivered)
            self.counters["gets"] += 1
        take.held = []
        take.open = False
        take.on_items(take, list(take.delivered))

    def _drained_for(self, client: Client, queue: KeyQueue, key: Key) -> bool:
        """Whether nothing can come back any more; what the asking client itself holds does not keep it waiting."""
        if queue.items or queue.delayed:
            return False
        return not any(entry.item.key == key and entry.client is not client for entry in self._out.values())

    def _withdraw(self, take: Take, queue: KeyQueue) -> None:
        take.open = False
        queue.takes.remove(take)
        queue.insert(take.held)
        take.held = []

    def _current(self, token: str) -> Delivered | None:
        delivered = self._out.get(token)
        if delivered is None:
            self.counters["stale_acks"] += 1
        return delivered

    def _forget(self, delivered: Delivered) -> None:
        del self._out[delivered.token]
        delivered.take.delivered.remove(delivered)

    def _delete(self, delivered: Delivered) -> None:
        self._forget(delivered)
        self.bytes -= delivered.item.nbytes
        self._on_drop(delivered.item.payload)

    def _return(self, now: float, delivered: Delivered, *, lost: bool, delay: float = 0.0) -> None:
        self._forget(delivered)
        item = delivered.item
        if lost:
            item.attempt += 1
            if item.attempt > self.options.max_attempts:
                self.counters["dead"] += 1
                self.bytes -= item.nbytes
                self.dead[delivered.token] = item
                return
        self.counters["redelivered"] += 1
        self._back(now, item, delay)

    def _back(self, now: float, item: Item, delay: float) -> None:
        queue = self._queue(item.key)
        if delay > 0:
            queue.delayed += 1
            heapq.heappush(self._delayed, (now + delay, item.number, item))
        else:
            queue.insert([item])

    def _close_if_done(self, now: float) -> None:
        if not self.producers:
            lost = ", ".join(self._lost_producers)
            self.close(now, error=ProducerLost(f"channel {self.name!r} lost its producers {lost}") if lost else None)

    def _end(self, key: Key, queue: KeyQueue) -> Exception:
        error = queue.error if queue.closed else self._error
        return error or ChannelClosed(f"channel {self.name!r} key {key!r} is closed and drained")

    def _refused(self, key: Key, queue: KeyQueue) -> ChannelClosed:
        error = queue.error if queue.closed else self._error
        return ChannelClosed(f"channel {self.name!r} key {key!r} is closed{f': {error}' if error else ''}")

    def _depth_text(self, queue: KeyQueue) -> str:
        out = sum(1 for entry in self._out.values())
        producers = ", ".join(dict.fromkeys(self.producers.values())) or "none registered"
        return f"depth {len(queue.items)}, {self.bytes} bytes, {out} items with consumers, live producers: {producers}"

    def _waited(self, what: str, key: Key, queue: KeyQueue, seconds: float) -> str:
        return f"{what} channel {self.name!r} key {key!r} waited {seconds:.1f} s: {self._depth_text(queue)}"
