"""Programs that compare kernels in Triton's interpreter, each in a process of its own: the interpreter is chosen at import."""

from tests.support.runs import forks

#: Seconds after which a program is ended; the longest of the night takes some minutes.
TIMEOUT = 3600


def printed_by(*command):
    """What a program prints, which has to end well."""
    done = forks.python(*command, server="interpreter", timeout=TIMEOUT)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, "\n".join([str(done.returncode), *lines[-1:], done.stderr[-3000:]])
    return lines


def lines_of(*command):
    """What a program prints before it says that all agreed."""
    lines = printed_by(*command)
    assert lines[-1] == "agreed"
    return lines[:-1]
