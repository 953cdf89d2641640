"""Bodies made before their instant: a bounded number of them, piece by piece between other work."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter

from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

MAX_BODIES = 512
MAX_BYTES = 64 << 20

SLICE_S = 0.0005
SLICE_SHARE = 0.1
"""Making goes on for SLICE_S at a time, or for this share of the time that everything else has just taken: a busy event
loop comes round seldom, and must not run out of bodies for that."""


class Body(Payload):
    """A request body in pieces, each let go of when written: thousands of open streams need not keep theirs."""

    _autoclose = True

    def __init__(self, pieces: list[bytes]) -> None:
        super().__init__(None, content_type="application/json")
        self.num_bytes = self._size = sum(map(len, pieces))
        self._pieces = deque(pieces)

    async def write(self, writer: AbstractStreamWriter) -> None:
        while self._pieces:
            await writer.write(self._pieces.popleft())

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._pieces).decode(encoding, errors)


class Lookahead:
    """Bodies 0 to n - 1 in order, made ahead by `fill` and handed out by `take`.

    Nothing is made while MAX_BODIES or MAX_BYTES are waiting. Making yields to the event loop after every slice (see
    SLICE_S), at the earliest after one piece.
    """

    def __init__(self, num_bodies: int, make: Callable[[int], Iterator[bytes]]) -> None:
        self._num_bodies = num_bodies
        self._make = make
        self._ready: deque[Body] = deque()
        self._num_bytes = 0
        self._room = asyncio.Event()
        self._arrival = asyncio.Event()
        self._is_primed = asyncio.Event()
        self._failure: Exception | None = None

    async def fill(self) -> None:
        """Makes all bodies; whatever goes wrong is raised here and by a `take` that would wait for ever."""
        try:
            await self._make_all()
        except Exception as error:
            self._failure = error
            raise
        finally:
            self._is_primed.set()
            self._arrival.set()

    async def _make_all(self) -> None:
        resumed_s, slice_s = perf_counter(), SLICE_S
        for index in range(self._num_bodies):
            pieces = []
            for piece in self._make(index):
                pieces.append(piece)
                if (left_s := perf_counter()) - resumed_s >= slice_s:
                    await asyncio.sleep(0)
                    resumed_s = perf_counter()
                    slice_s = max(SLICE_S, SLICE_SHARE * (resumed_s - left_s))
            body = Body([b"".join(pieces)] if len(pieces) <= 4 else pieces)
            while len(self._ready) >= MAX_BODIES or (self._ready and self._num_bytes + body.num_bytes > MAX_BYTES):
                self._is_primed.set()
                self._room.clear()
                await self._room.wait()
            self._ready.append(body)
            self._num_bytes += body.num_bytes
            self._arrival.set()

    async def primed(self) -> None:
        """Returns once as many bodies are waiting as there is room for, or all."""
        await self._is_primed.wait()

    async def take(self) -> Body:
        while not self._ready:
            if self._failure is not None:
                raise self._failure
            self._arrival.clear()
            await self._arrival.wait()
        body = self._ready.popleft()
        self._num_bytes -= body.num_bytes
        self._room.set()
        return body
