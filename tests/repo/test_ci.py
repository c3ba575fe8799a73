"""What continuous integration runs fails where any of its targets fails, and says which."""

import os
import subprocess

import pytest

from experiments.harness.rows import ROOT

#: In place of make: fails for one target.
MAKE = """#!/bin/sh
for given in "$@"; do [ "$given" != "$FAILING" ] || exit 2; done
"""


@pytest.mark.parametrize("failing", ["", "install-test", "test", "lint", "docs", "nightly"])
def test_a_target_that_fails_fails_the_run(tmp_path, failing):
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "run"
    script.write_text((ROOT / ".ci" / "run").read_text())
    for name, text in {"make": MAKE, "chromium": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "FAILING": failing}
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == int(bool(failing))
    told = done.stdout.partition("== what ran")[2].splitlines()
    failed = [line.split()[1].rstrip(":") for line in told if "FAILED" in line]
    assert failed == [failing] * bool(failing)
    assert any("passed" in line for line in told) == (failing != "install-test")
