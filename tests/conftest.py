"""Settings of the whole test run.

Hypothesis: `default` looks at new examples in every run and keeps the failures it found; `ci` (HYPOTHESIS_PROFILE=ci, set by
`.ci/run`) draws the same examples every time and stores nothing. Neither has a deadline: machines are shared, and a slow
example is no wrong one. The number of examples is the same in both: no profile makes a test weaker.
"""

import os

# One thread a test process: the processes share the cores. Read by torch and NumPy when they are first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

from hypothesis import HealthCheck, settings

from ao_lab.cli.terminal import progress

settings.register_profile(
    "default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Lines of progress come by the clock, and how long a test takes is the machine's affair; their own tests set it back.
progress.INTERVAL = 3600.0
