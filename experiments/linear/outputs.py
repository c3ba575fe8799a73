"""Outputs of layers on any device: their errors, and what computes them. No times: a CPU's are in experiment `speed`."""

from __future__ import annotations

from functools import partial

from experiments.harness.outcome import Values, attempt, kernel
from experiments.linear.layers import checked, kernel_of
from experiments.linear.methods import BASE, Method
from experiments.linear.tables import Table

#: The metric of the error.
ERROR = "relative error"


def measure(table: Table) -> dict[str, Values]:
    """Values of each method; one that fails has a status instead."""
    return {method.name: attempt(partial(outputs, table, method)) for method in table.methods}


def outputs(table: Table, method: Method) -> Values:
    """Of the first layer and input; `Wrong` for an output that is not the product of what is stored."""
    (layer, *_), (x, *_) = table.layers.of(method, table.rows), table.layers.inputs(table.rows, 1)
    dense = table.layers.of(BASE, table.rows)[0].weight
    error = checked(method, layer, layer(x), x, dense)
    return {ERROR: (error, "ratio"), **kernel(kernel_of(method, layer, table.rows))}


__all__ = ["ERROR", "measure", "outputs"]
