"""Runs all parts of a launch: servers, then the router, then until somebody asks to stop.

    start servers (together) -> all ready -> start router -> ready -> cluster answers `/ready` -> serve -> stop all

Any part that cannot be mended ends the launch; so does a start that takes too long.
"""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence

from twostroke.cli.up.part import Part
from twostroke.protocol.errors import TwostrokeError

STOP_GRACE_S = 8.0
"""From SIGTERM to SIGKILL: a server gives its world 5 s, and all must be gone in 10."""

Probe = Callable[[], Awaitable[None]]


class StartTimeoutError(TwostrokeError):
    """The cluster was not ready in time."""


class Supervisor:
    """Owns the parts of one launch.

    Args:
        servers: Started together, first.
        router: Started when all servers are ready.
        probe: Returns once the cluster answers requests.
        start_timeout_s: All must be ready in so many seconds.
        stop_grace_s: From asking a part to end to making it.
    """

    def __init__(
        self,
        servers: Sequence[Part],
        router: Part,
        probe: Probe,
        start_timeout_s: float,
        stop_grace_s: float = STOP_GRACE_S,
    ) -> None:
        self._servers = servers
        self._router = router
        self._probe = probe
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._stop = asyncio.Event()

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Run until asked to stop by SIGINT, SIGTERM or SIGHUP; a second one kills instead of waiting.

        Args:
            on_ready: Called once, when the cluster answers requests.

        Raises:
            PartFailedError: A part cannot be mended.
            StartTimeoutError: Not ready in time.
        """
        running: list[asyncio.Task[None]] = []
        with self._signals():
            try:
                await self._until_stop(self._start(running), running)
                if not self._stop.is_set():
                    on_ready()
                    await self._until_stop(self._stop.wait(), running)
            finally:
                await self._stop_all(running)

    async def _start(self, running: list[asyncio.Task[None]]) -> None:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                running += [asyncio.create_task(part.run(), name=part.name) for part in self._servers]
                for part in self._servers:
                    await part.ready.wait()
                running.append(asyncio.create_task(self._router.run(), name=self._router.name))
                await self._router.ready.wait()
                await self._probe()
        except TimeoutError:
            late = [part.name for part in (*self._servers, self._router) if not part.ready.is_set()]
            names = ", ".join(late) or "the router's /ready"
            raise StartTimeoutError(
                f"not ready within {self._start_timeout_s:.0f} s; still waiting for {names}"
            ) from None

    async def _until_stop(self, work: Awaitable[object], running: list[asyncio.Task[None]]) -> None:
        """Wait for `work`, for a stop, or for a part that fails, whichever is first; `running` may grow meanwhile."""
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            while not (working.done() or stopping.done()):
                await asyncio.wait({working, stopping, *running}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                for task in running:
                    if task.done():
                        task.result()
            if working.done():
                working.result()
        finally:
            working.cancel()
            stopping.cancel()

    async def _stop_all(self, running: Sequence[asyncio.Task[None]]) -> None:
        await asyncio.gather(*(part.stop(self._stop_grace_s) for part in (self._router, *self._servers)))
        await asyncio.gather(*running, return_exceptions=True)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in watched:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in watched:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            for part in (self._router, *self._servers):
                part.kill()
        self._stop.set()
