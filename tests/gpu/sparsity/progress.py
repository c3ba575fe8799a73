"""What a command of this folder has found so far: checks that failed, and what no time was left for, printed as it comes."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable

import torch

#: Failures that print what was raised.
SHOWN = 20


class Progress:
    """Checks within `seconds`, after which nothing new starts; what did not start is named, and has not passed."""

    def __init__(self, seconds: float) -> None:
        self.begin = time.monotonic()
        self.end = self.begin + seconds
        self.done = 0
        self.wrong: list[str] = []
        self.left_out: list[str] = []

    def left(self) -> float:
        """Seconds of the budget."""
        return self.end - time.monotonic()

    def say(self, text: str) -> None:
        """Print with the seconds that have passed."""
        sys.stdout.write(f"[{time.monotonic() - self.begin:6.1f}] {text}\n")
        sys.stdout.flush()

    def check(self, label: str, good: bool, detail: str = "") -> None:
        """Count; print what is wrong."""
        self.done += 1
        if not good:
            self.wrong.append(label)
            self.say(f"WRONG {label}{': ' + detail if detail else ''}")

    def attempt(self, label: str, call: Callable[[], object]) -> None:
        """Call what checks; count an exception as a failed check, and go on. SystemExit where the GPU is lost."""
        if self.left() <= 0:
            self.left_out.append(label)
            return
        before, wrong, started = self.done, len(self.wrong), time.monotonic()
        try:
            call()
        except Exception as error:  # noqa: BLE001  others go on
            self.check(label, False, self._text(error))
            self._stop_if_lost()
        found = f"{self.done - before} checks, {len(self.wrong) - wrong} wrong"
        self.say(f"{label}: {found}, {time.monotonic() - started:.1f} s")

    def _text(self, error: Exception) -> str:
        """Where it was raised, and the last line of what was."""
        if len(self.wrong) >= SHOWN:
            return type(error).__name__
        places = traceback.extract_tb(error.__traceback__)
        where = " < ".join(f"{place.name}:{place.lineno}" for place in reversed(places[-3:]))
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0][:300]} ({where})"

    def _stop_if_lost(self) -> None:
        """After an illegal access nothing of this process runs any more."""
        if not torch.cuda.is_available():
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            self.say("the GPU is lost to this process")
            raise SystemExit(self.verdict()) from None

    def verdict(self) -> int:
        """Print the sum; 1 where something was wrong, 2 where something was not compared, else 0."""
        self.say(f"{self.done} checks, {len(self.wrong)} wrong, {len(self.left_out)} groups not compared")
        if self.left_out:
            self.say(f"NOT COMPARED, no time: {'; '.join(self.left_out)}")
        return 1 if self.wrong else 2 if self.left_out else 0


__all__ = ["Progress"]
