"""Every public function in the unusual situations of `tests.support.situations`, on the GPU: its one stated answer."""

from __future__ import annotations

from tests.gpu.harness.pool import Job
from tests.gpu.harness.run import Run, Settings
from tests.support.situations import EXAMPLES, SITUATIONS, walk


def jobs(settings: Settings) -> list[Job]:
    """Family "situations"."""
    return [
        Job("situations", example, example.partition(",")[0], situations_case, (example,), 5.0)
        for example in list(EXAMPLES)[:: 1 if settings.fraction > 0.2 else 4]
    ]


def situations_case(run: Run, example: str) -> None:
    """One check for each situation; twice, so that remembered calls are asked too."""
    for situation in SITUATIONS:
        for turn in ("first", "again"):
            wrong = list(walk(example, situation, run.device.type, run.fast))
            run.record(example.partition(",")[0], f"{situation} {turn}", 1, len(wrong), wrong)
