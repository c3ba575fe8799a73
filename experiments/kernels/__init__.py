"""Experiment `kernels`: the time of the kernels of `fast`, against the fewest bytes that they must move and against baselines.

`cases` lists what is measured, with the target of each; `operations` makes cases, and counts bytes; `baselines` has the same
work in torch, torch.compile and torchao; `run` compares results with the reference, measures and makes rows; `page` shows them.
"""

from experiments.harness.registry import Experiment

#: Times kernels on a GPU; `ao-lab bench-kernels` is the comfortable way.
EXPERIMENT = Experiment(order=40, always=False, trained=False, compressed=True, folders=("reference", "fast"))
