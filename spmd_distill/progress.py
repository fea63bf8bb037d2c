"""What a person sees while a run works: a bar on a terminal, a plain line now and then anywhere else."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.spinner import Spinner
from rich.text import Text

__all__ = ["TrainProgress"]

_SECONDS, _SHARE = 5.0, 0.1
"""A plain line is written after this long or after this share of all steps, whichever comes first."""
_WINDOW = 50
"""Steps that the time left is judged by."""


_SHOWN: dict[str, Callable[[float], str]] = {
    "loss": lambda x: f"loss {x:.4g}",
    "kl": lambda x: f"KL {x:.4g}",
    "tokens_per_second": lambda x: f"{_short(x)} tokens/s",
    "mfu": lambda x: f"MFU {100 * x:.1f} %",
    "data_wait": lambda x: f"data wait {100 * x:.0f} %" if x >= _WAITS else "",
}
_WAITS = 0.05
"""A smaller share of the time spent waiting for data is not worth a word."""


class TrainProgress:
    """Progress of a run: ``step 12/100  loss 2.3  KL 0.41  9.8k tokens/s  0:01:02, 0:07:30 left``.

    Where the peak of the devices is known, ``MFU 41.2 %`` (model FLOPs utilisation) is there too, and ``data wait
    12 %`` where the steps wait for batches.

    Use as a context manager. On a terminal it is one live line, with a spinner above it during a `stage`;
    where the output goes to a file or a pipe, plain lines without control codes. No work goes to devices.
    """

    def __init__(
        self,
        total_steps: int,
        console: Console | None = None,
        enabled: bool | None = None,
        *,
        first_step: int = 0,
    ):
        """Prepare; nothing is shown before the context is entered.

        Args:
            total_steps: optimizer steps at the end of the run.
            console: where to write; None: a console on stderr.
            enabled: False shows nothing at all, for all processes but one; None and True show it.
            first_step: optimizer steps done before, in a resumed run.
        """
        self._console = console or Console(stderr=True)
        self._enabled = enabled is not False
        self._total = total_steps
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}", markup=False),
            console=self._console,
            expand=True,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("train", total=total_steps, completed=first_step, status="")
        self._step, self._numbers = first_step, list[str]()
        self._ends: float | None = None
        self._stages: list[Spinner] = []
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._began = self._said_at = time.monotonic()
        self._said_step = first_step
        self._recent: deque[tuple[float, int]] = deque(maxlen=_WINDOW)

    def __enter__(self) -> "TrainProgress":
        self._began = time.monotonic()
        if self._enabled and self._console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=8)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, step: int, values: Mapping[str, float] | None = None) -> None:
        """Show that ``step`` optimizer steps are done.

        Args:
            step: optimizer steps done.
            values: numbers by the names of ``metrics.jsonl``; the line shows those that it knows.
        """
        now = time.monotonic()
        self._recent.append((now, step))
        with self._lock:
            self._step = step
            self._numbers = [show(values[name]) for name, show in _SHOWN.items() if values and name in values]
            self._ends = self._end(step)
        if not self._enabled or self._live is not None:
            return
        late = now - self._said_at >= _SECONDS or step - self._said_step >= _SHARE * self._total
        if late or step >= self._total:
            self._said_at, self._said_step = now, step
            self._say(f"step {step}/{self._total}  {self._status()}")

    @contextmanager
    def stage(self, message: str) -> Iterator[None]:
        """Show that a long phase is under way, such as "compiling the step", and then how long it took."""
        began = time.monotonic()
        spinner = Spinner("dots", Text(f"{message} ..."), style="cyan")
        if self._enabled and self._live is None:
            self._say(f"{message} ...")
        with self._lock:
            self._stages.append(spinner)
        done = False
        try:
            if self._live is not None:
                self._live.refresh()  # its own thread may get no turn while this one compiles
            yield
            done = True
        finally:
            with self._lock:
                self._stages.remove(spinner)
            if self._live is not None:
                self._live.refresh()
            if self._enabled:
                took = f"{time.monotonic() - began:.1f} s"
                self._say(f"{message}: {took if done else f'stopped after {took}'}")

    def note(self, message: str) -> None:
        """Say something once, above the live line."""
        if self._enabled:
            self._say(message)

    def _render(self) -> RenderableType:
        with self._lock:
            self._bar.update(self._task, completed=self._step, status=self._status())
            return Group(*self._stages, self._bar.get_renderable())

    def _status(self) -> str:
        """The numbers, the time gone by, and the time left, counted down between two updates."""
        now = time.monotonic()
        left = "" if self._ends is None else f", {_clock(max(self._ends - now, 0.0))} left"
        return "  ".join([*filter(None, self._numbers), _clock(now - self._began) + left])

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _end(self, step: int) -> float | None:
        """When the last step will be done, at the pace of the latest ones; None until two are known."""
        (began, first), (now, last) = self._recent[0], self._recent[-1]
        return now + (now - began) / (last - first) * (self._total - step) if last > first else None


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _short(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
