"""Experiment `kernels`: how fast the kernels of `fast` are, against the fewest bytes that they must move and against peers.

`cases` is the list of what is measured, with the bar that each has to reach; `floors` counts bytes; `timing` times; `check`
refuses to time what is wrong; `peers` and `expressions` are what others offer for the same work; `run` does it all and makes
rows; `roofline` and `page` show them. The ledger (`experiments.ledger.ledger`) keeps a summary per kernel file.
"""

from experiments.harness.registry import Experiment

#: Times kernels on a GPU; `ao-lab bench` is the comfortable way.
EXPERIMENT = Experiment(order=40, always=False, trained=False, page="report.page")
