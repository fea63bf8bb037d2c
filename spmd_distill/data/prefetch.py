"""The batches to come, prepared in the background while a step runs."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Hands out ``fetch(first)``, ``fetch(first + 1)``, ... in order, up to ``depth`` of them prepared ahead.

    A thread calls ``fetch``, which must be host work alone: nothing here touches a device, so that the order in which
    programs reach the devices stays the caller's. What ``fetch`` raises is raised by `get`, for the step that it
    belongs to. Use as a context manager, or call `close`: either ends the thread.
    """

    def __init__(self, fetch: Callable[[int], T], first: int, last: int, depth: int = 2):
        """Prepare steps ``first`` up to, and without, ``last``; a ``depth`` of 0 prepares each in `get`, unthreaded."""
        self._fetch, self._next, self._last = fetch, first, last
        self.waited = 0.0
        """Seconds that the latest `get` took: what its caller waited for data."""
        self._stop = threading.Event()
        self._ready: queue.Queue[tuple[int, T | None, BaseException | None]] = queue.Queue(max(depth, 1))
        self._thread: threading.Thread | None = None
        if depth and first < last:
            self._thread = threading.Thread(target=self._work, args=(first,), name="prefetch", daemon=True)
            self._thread.start()

    def get(self, step: int) -> T:
        """The batch of the next step, which must be ``step``; raises what preparing it raised."""
        assert step == self._next < self._last, f"asked for step {step}, next is {self._next} of {self._last}"
        began = time.monotonic()
        if self._thread is None:
            value, error = self._fetch(step), None
        else:
            found, value, error = self._ready.get()
            assert found == step
        self.waited = time.monotonic() - began
        if error is not None:
            self.close()
            raise error
        self._next += 1
        return value  # pyright: ignore[reportReturnType]

    def close(self) -> None:
        """End the thread; what it has prepared is dropped."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            while thread.is_alive():
                try:
                    self._ready.get_nowait()  # a thread that waits for room sees that it shall stop
                except queue.Empty:
                    thread.join(0.01)

    def __enter__(self) -> "Prefetch[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self, first: int) -> None:
        for step in range(first, self._last):
            if self._stop.is_set():
                return
            try:
                self._ready.put((step, self._fetch(step), None))
            except BaseException as error:
                self._ready.put((step, None, error))
                return
