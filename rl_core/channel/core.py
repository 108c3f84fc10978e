"""The rules of a channel without any I/O: keyed FIFO queues, waiting puts and takes, receipts, closing.

`server` and `local` drive it: they call the methods from one thread or under one lock, pass the current time, and get results by callbacks.
Payloads are opaque. A receipt, or token, identifies an item that was delivered and not yet confirmed. Invariants: the items of a key are in
the order of acceptance; while takes wait for a key, its queue is empty; a take is one transaction, whose items return in order if it fails;
a key without any state is deleted, so only `close`, `client_lost` and `stats` iterate over the keys.
"""

import itertools
import math
import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from rl_core.api.errors import ChannelClosed, ChannelEmpty, ChannelFull, DeadlineExceeded, ProducerLost
from rl_core.channel.model import Client, Delivery, Item, KeyQueue, Put, Take
from rl_core.channel.waiting import DeadlineHeap
from rl_core.messages.channel import ChannelOptions, ChannelStats, Key, KeyStats


class ChannelCore:
    """One channel. Methods take the current time `now` in seconds of one clock; `tick` ends operations whose deadline has passed."""

    def __init__(
        self, name: str, options: ChannelOptions, *, on_drop: Callable[[Any], None] = lambda payload: None
    ) -> None:
        """Create an empty channel. `on_drop(payload)` is called once for each payload that leaves it."""
        self.name = name
        self.options = options
        self.counters: Counter[str] = Counter()
        """puts, gets, redelivered."""
        self.put_wait_seconds = 0.0
        self.bytes = 0
        self.producers: dict[tuple[Client, int], str] = {}
        """Producers that are registered and not done, by client and number of the registration: a process may have several."""
        self._lost_producers: list[str] = []
        self._on_drop = on_drop
        self._keys: dict[Key, KeyQueue] = {}
        self._waiting = DeadlineHeap()
        self._short_of_bytes: dict[Key, KeyQueue] = {}
        """Keys with waiting puts, which may wait for bytes that another key frees."""
        self._out: dict[str, Take] = {}
        """Token -> the take that delivered the item, for items that are neither confirmed nor returned."""
        self._closed = False
        self._error: Exception | None = None
        self._numbers = itertools.count()
        self._tokens = itertools.count()
        self._prefix = secrets.token_hex(4)
        """Random beginning of all tokens, so that a receipt for an item of an earlier server is not taken for one of an item here."""

    # --- putting ---

    def put(self, now: float, put: Put, *, nowait: bool = False) -> None:
        """Request room for an item; `store` brings its payload.

        Calls `put.on_room` when there is room, in the order of requests, and `put.on_error` on a deadline or close. With `nowait`,
        ChannelFull is the error if there is no room now. Raises ValueError for an item that is larger than the whole channel.
        """
        self.options.check_fits(self.name, put.nbytes)
        queue = self._queue(put.key)
        if self._is_closed(queue):
            put.on_error(self._refusal_error(put.key, queue))
            self._forget_idle(put.key, queue)
            return
        queue.puts.append(put)
        self._pump(now, put.key, queue)
        if put.waits and nowait:
            put.open = False
            queue.puts.remove(put)
            put.on_error(
                ChannelFull(
                    f"channel {self.name!r} key {put.key!r} is full, {self.options.limits}: {self._depth_text(queue)}"
                )
            )
            self._forget_idle(put.key, queue)
        elif put.waits:
            self._waiting.add(put)
            if self.options.max_bytes is not None:
                self._short_of_bytes[put.key] = queue

    def store(self, now: float, put: Put, payload: Any, weight: float) -> None:
        """Store the payload of a put that has room. Raises ChannelClosed when the key was closed meanwhile."""
        if not put.admitted or not put.open:
            raise ChannelClosed(f"the room for this item in channel {self.name!r} key {put.key!r} was given up")
        queue = self._queue(put.key)
        put.open = False
        queue.filling.remove(put.client)
        if self._is_closed(queue):
            self.bytes -= put.nbytes
            self._pump_freed(now, put.key)
            raise self._refusal_error(put.key, queue)
        queue.items.append(Item(next(self._numbers), put.key, payload, put.nbytes, weight, now))
        self.counters["puts"] += 1
        self.put_wait_seconds += now - put.since
        self._pump(now, put.key, queue)

    def cancel_put(self, now: float, put: Put) -> None:
        """Cancel a waiting put, or release the room of one that was granted."""
        if not put.open:
            return
        put.open = False
        queue = self._queue(put.key)
        if put.admitted:
            queue.filling.remove(put.client)
            self.bytes -= put.nbytes
        else:
            queue.puts.remove(put)
        self._pump_freed(now, put.key)

    # --- taking ---

    def take(self, now: float, take: Take, *, nowait: bool = False) -> None:
        """Take the oldest items of `take.key`: up to `take.most`, or a batch of the weight `take.target`.

        Calls `take.on_items` when the take is complete, in the order of requests, and `take.on_error` on a deadline or close. With
        `nowait`, ChannelEmpty is the error if the take is not complete now.
        """
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
        """Cancel a waiting take, or return the unconfirmed items of a finished one to the head of the queue."""
        if take.open:
            self._withdraw(take, self._queue(take.key))
        for token in list(take.out):
            self._return(token)
        self._pump_freed(now, take.key)

    def confirm(self, now: float, tokens: Iterable[str]) -> None:
        """Delete the items with these tokens, which their consumers have received. Unknown tokens are ignored."""
        keys = []
        for token in tokens:
            if token in self._out:
                item = self._end_delivery(token)
                self.bytes -= item.nbytes
                self._on_drop(item.payload)
                keys.append(item.key)
        self._pump_freed(now, *keys)

    def requeue(self, now: float, tokens: Iterable[str]) -> None:
        """Return the items with these tokens to the head of their queues. Unknown tokens are ignored."""
        keys = [self._return(token) for token in tokens if token in self._out]
        self._pump_freed(now, *keys)

    def move(self, now: float, moves: Iterable[tuple[Key, Key | None]]) -> None:
        """Append the stored items of each (source, target) to the target key, in their order; delete them where the target is None.

        A source without items is passed over.
        """
        for source, target in moves:
            queue = self._keys.get(source)
            if queue is None or source == target:
                continue
            items, queue.items = queue.items, deque()
            for item in items:
                if target is None:
                    self.bytes -= item.nbytes
                    self._on_drop(item.payload)
                else:
                    item.key = target
            if target is None:
                self._pump_freed(now, source)
            else:
                self._queue(target).items.extend(items)
                self._pump(now, source, queue)
                self._pump(now, target, self._queue(target))

    # --- clients and the end ---

    def register_producer(self, client: Client, registration: int = 0) -> None:
        """Register a producer; the channel closes when all are done. Raises ChannelClosed when it is closed.

        `registration` is the client's number for it. A repeated message with the same number counts once.
        """
        if self._closed:
            raise ChannelClosed(f"channel {self.name!r} is closed; no producer can join")
        self.producers[client, registration] = client.name

    def done_producing(self, now: float, client: Client, registration: int = 0) -> None:
        """Mark a producer as done."""
        if self.producers.pop((client, registration), None) is not None:
            self._close_if_done(now)

    def client_lost(self, now: float, client: Client) -> None:
        """Handle the loss of `client`.

        Its unconfirmed items return to their queues, its waiting operations are cancelled, and its producers that are not done count as
        lost.
        """
        for queue in self._keys.values():
            for take in [take for take in queue.takes if take.client is client]:
                self._withdraw(take, queue)
            for put in [put for put in queue.puts if put.client is client]:
                put.open = False
                queue.puts.remove(put)
        for token in [token for token, take in self._out.items() if take.client is client]:
            self._return(token)
        lost_producers = [producer for producer in self.producers if producer[0] is client]
        for producer in lost_producers:
            del self.producers[producer]
        if lost_producers:
            self._lost_producers.append(client.name)
            self._close_if_done(now)
        self._pump_all(now)

    def close(self, now: float, key: Key | None = None, error: Exception | None = None) -> None:
        """Refuse later puts to `key` (None: all keys).

        Stored items are still delivered; then takes fail with `error`, or with ChannelClosed. Of several errors the first is kept.
        """
        if key is None and not self._closed:
            self._closed, self._error = True, error
        elif key is not None and not self._queue(key).closed:
            queue = self._queue(key)
            queue.closed, queue.error = True, error
        for name, queue in list(self._keys.items()):
            if self._is_closed(queue):
                for put in list(queue.puts):
                    put.open = False
                    put.on_error(self._refusal_error(name, queue))
                queue.puts.clear()
        self._pump_all(now)

    # --- time ---

    def tick(self, now: float) -> None:
        """End the puts and takes whose deadline has passed. Their `on_error` gets a DeadlineExceeded."""
        for operation in self._waiting.pop_overdue(now):
            if not operation.waits:  # the error of an earlier operation has made room for this one
                continue
            queue, channel_text = self._queue(operation.key), f"channel {self.name!r} key {operation.key!r}"
            if isinstance(operation, Put):
                operation.open = False
                queue.puts.remove(operation)
                operation_text, reason = f"put on {channel_text}", f" for room, {self.options.limits}"
            elif operation.target is None:
                self._withdraw(operation, queue)
                operation_text, reason = f"get from {channel_text}", ""
            else:
                weight = math.fsum(operation.weight)
                operation_text, reason = (
                    f"get_batch from {channel_text}",
                    f" for items of weight {operation.target:g}, got {weight:g}",
                )
                self._withdraw(operation, queue)
            waited = f"{operation_text} waited {now - operation.since:.1f} s{reason}"
            operation.on_error(DeadlineExceeded(f"{waited}: {self._depth_text(queue)}"))
            self._pump(now, operation.key, queue)

    def next_due(self) -> float:
        """Return the time of the next deadline; infinity if nothing waits."""
        return self._waiting.next_deadline()

    # --- looking ---

    def depth(self, key: Key) -> int:
        """Return the number of stored items of `key`. Delivered items, and items collected for a batch, do not count."""
        queue = self._keys.get(key)
        return len(queue.items) if queue is not None else 0

    def is_full(self, key: Key) -> bool:
        """Return whether a put of one byte would wait; False for an unknown key."""
        queue = self._keys.get(key)
        return queue is not None and not self._has_room(queue, 1)

    def stats(self, now: float) -> ChannelStats:
        """Return depth, bytes and age of each key in use, and the counters; never payloads."""
        queues = tuple(
            KeyStats(
                key=key,
                depth=len(queue.items),
                bytes=sum(item.nbytes for item in queue.items),
                oldest_age_seconds=now - queue.items[0].stored_at if queue.items else 0.0,
                waiters=len(queue.takes),
            )
            for key, queue in self._keys.items()
        )
        return ChannelStats(
            name=self.name,
            queues=queues,
            bytes=self.bytes,
            producers=tuple(dict.fromkeys(self.producers.values())),
            closed=self._closed,
            put_wait_seconds=self.put_wait_seconds,
            puts=self.counters["puts"],
            gets=self.counters["gets"],
            redelivered=self.counters["redelivered"],
        )

    # --- inside ---

    def _queue(self, key: Key) -> KeyQueue:
        queue = self._keys.get(key)
        if queue is None:
            queue = self._keys[key] = KeyQueue()
        return queue

    def _is_closed(self, queue: KeyQueue) -> bool:
        return self._closed or queue.closed

    def _has_room(self, queue: KeyQueue, nbytes: int) -> bool:
        options = self.options
        if options.maxsize and len(queue.items) + len(queue.filling) >= options.maxsize:
            return False
        return options.max_bytes is None or self.bytes + nbytes <= options.max_bytes

    def _pump_freed(self, now: float, *keys: Key) -> None:
        """Serve waiting operations of `keys`, where items or room came back, and puts of other keys for which there are bytes again."""
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
        """Grant room to waiting puts and serve waiting takes until neither is possible."""
        # A callback called this. The outer loop goes on; nested loops would be as deep as there are waiting puts.
        if queue.pumping:
            return
        queue.pumping = True
        try:
            while self._grant_room(queue) or self._serve_takes(key, queue):
                pass
        finally:
            queue.pumping = False
        self._forget_idle(key, queue)

    def _forget_idle(self, key: Key, queue: KeyQueue) -> None:
        if queue.can_be_deleted and self._keys.get(key) is queue:
            del self._keys[key]

    def _grant_room(self, queue: KeyQueue) -> bool:
        """Grant the free room to waiting puts; return whether a put was granted."""
        progressed = False
        while (put := self._next_put(queue)) is not None:
            queue.puts.remove(put)
            put.admitted = True
            queue.filling.add(put.client)
            self.bytes += put.nbytes
            put.on_room(put)
            progressed = True
        return progressed

    def _next_put(self, queue: KeyQueue) -> Put | None:
        """Return the next put to grant room to, or None.

        Each client may have one granted put whose payload has not come. The oldest waiting put of the other clients is the next one, if there
        is room for it; puts behind it wait.
        """
        for put in queue.puts:
            if put.client not in queue.filling:
                return put if self._has_room(queue, put.nbytes) else None
        return None

    def _serve_takes(self, key: Key, queue: KeyQueue) -> bool:
        """Serve waiting takes; return whether one has ended or got an item."""
        progressed = False
        while queue.takes and self._serve(key, queue, queue.takes[0]):
            progressed = True
        return progressed

    def _serve(self, key: Key, queue: KeyQueue, take: Take) -> bool:
        """Give stored items to the first waiting take; return whether it has ended or got an item."""
        num_held = len(take.held)
        if take.pick(queue.items) or (take.held and self._is_closed(queue)):
            queue.takes.popleft()
            self._deliver(take)
            return True
        if self._is_closed(queue) and self._drained_for(take.client, queue, key):
            queue.takes.popleft()
            take.open = False
            take.on_error(self._end_error(key, queue))
            return True
        return len(take.held) > num_held

    def _deliver(self, take: Take) -> None:
        deliveries = []
        for item in take.held:
            delivery = Delivery(f"{self._prefix}-{next(self._tokens)}", item.payload)
            self._out[delivery.token] = take
            take.out[delivery.token] = item
            deliveries.append(delivery)
        self.counters["gets"] += len(deliveries)
        take.held = []
        take.open = False
        take.on_items(take, deliveries)

    def _drained_for(self, client: Client, queue: KeyQueue, key: Key) -> bool:
        """Return whether a closed key has no item for `client`: none is stored, and no other client holds unconfirmed ones that may return."""
        if queue.items:
            return False
        return not any(take.key == key and take.client is not client for take in self._out.values())

    def _withdraw(self, take: Take, queue: KeyQueue) -> None:
        take.open = False
        queue.takes.remove(take)
        queue.insert(take.held)
        take.held = []

    def _end_delivery(self, token: str) -> Item:
        return self._out.pop(token).out.pop(token)

    def _return(self, token: str) -> Key:
        item = self._end_delivery(token)
        self.counters["redelivered"] += 1
        self._queue(item.key).insert([item])
        return item.key

    def _close_if_done(self, now: float) -> None:
        if not self.producers:
            names = ", ".join(self._lost_producers)
            self.close(now, error=ProducerLost(f"channel {self.name!r} lost its producers {names}") if names else None)

    def _end_error(self, key: Key, queue: KeyQueue) -> Exception:
        error = queue.error if queue.closed else self._error
        return error or ChannelClosed(f"channel {self.name!r} key {key!r} is closed and drained")

    def _refusal_error(self, key: Key, queue: KeyQueue) -> ChannelClosed:
        error = queue.error if queue.closed else self._error
        return ChannelClosed(f"channel {self.name!r} key {key!r} is closed{f': {error}' if error else ''}")

    def _depth_text(self, queue: KeyQueue) -> str:
        producers = ", ".join(dict.fromkeys(self.producers.values())) or "none registered"
        return f"depth {len(queue.items)}, {self.bytes} bytes, {len(self._out)} items with consumers, live producers: {producers}"
