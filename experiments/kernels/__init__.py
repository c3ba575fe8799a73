"""Experiment `kernels`: the time of the kernels of `fast`, against the fewest bytes that they must move and against baselines.

`cases` lists what is measured, with the target of each; `cases.floors` counts bytes; `gate` compares results with the
reference before anything is timed; `baselines` has the same work in torch, torch.compile and torchao; `run` measures and makes
rows; `report` shows them.
"""

from experiments.harness.registry import Experiment

#: Times kernels on a GPU; `ao-lab bench` is the comfortable way.
EXPERIMENT = Experiment(
    compressed=True, order=40, always=False, trained=False, page="report.page", folders=("reference", "fast")
)
