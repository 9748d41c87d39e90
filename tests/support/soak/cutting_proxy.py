"""A proxy of a service on its own port, which cuts connections within messages.

It forwards bytes unchanged. While it cuts, it forwards a part of a read and closes the connection:
the service gets half of a body, or the client gets the begin of a response or nothing.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from anabranch.dev.services.processes import HOST

_AT_ONCE = 64 * 1024
_SECONDS = 10.0


class CuttingProxy:
    """The number of connections cut in a request (`bodies`) or a response (`answers`), by its own
    thread. `upstream_port`: the service's port, which may be set later."""

    def __init__(self, seed: int) -> None:
        self.port = 0
        self.upstream_port = 0
        self.bodies = self.answers = 0
        self._dice = random.Random(seed)
        self._chance = 0.0
        self._loop = asyncio.new_event_loop()
        self._pumps: set[asyncio.Task[None]] = set()

    @property
    def cuts(self) -> int:
        return self.bodies + self.answers

    @contextmanager
    def cutting(self, chance: float) -> Iterator[None]:
        """Within a `with`, cut at each read with this probability."""
        self._chance = chance
        try:
            yield
        finally:
            self._chance = 0.0

    @contextmanager
    def running(self) -> Iterator[CuttingProxy]:
        """Listen until the end of the `with`, which closes every connection."""
        thread = threading.Thread(target=self._loop.run_forever, name="wire", daemon=True)
        thread.start()
        try:
            server = asyncio.run_coroutine_threadsafe(
                asyncio.start_server(self._serve, HOST, 0), self._loop
            ).result(_SECONDS)
            self.port = server.sockets[0].getsockname()[1]
            yield self
            asyncio.run_coroutine_threadsafe(self._end(server), self._loop).result(_SECONDS)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(_SECONDS)
            self._loop.close()

    async def _end(self, server: asyncio.Server) -> None:
        server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pumps.add(task)
        writers = [writer]
        try:
            onward, back = await asyncio.open_connection(HOST, self.upstream_port)
            writers.append(back)
            directions = (self._pump(reader, back, False), self._pump(onward, writer, True))
            pumps = [asyncio.create_task(direction) for direction in directions]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # the service is down, or the proxy stops: this connection ends
        finally:
            for one in writers:
                # The forwarded part of a message still arrives.
                with suppress(OSError, asyncio.CancelledError):
                    one.close()
            self._pumps.discard(task)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bool
    ) -> None:
        """Forward bytes until one side closes the connection, or the dice decide to cut it."""
        with suppress(OSError):
            while data := await reader.read(_AT_ONCE):
                if self._dice.random() < self._chance:
                    writer.write(data[: self._dice.randrange(len(data))])
                    self.answers += answer
                    self.bodies += not answer
                    return
                writer.write(data)
                await writer.drain()
