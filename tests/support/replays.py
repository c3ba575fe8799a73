"""Stands in for CUDA graphs on a CPU: a recorder of `ao_lab.compile.captured_forward`."""

import torch

from ao_lab.compile.captured_forward import leaves, mapped


class Calls:
    """Records as a GPU does: recording computes nothing, a replay reads and writes what was recorded where it lies."""

    device = "cpu"

    def __init__(self, waits=0):
        self.waits, self.watched_runs, self.recorded, self.replays = waits, 0, 0, 0

    def watched(self, run):
        self.watched_runs += 1
        return run(), self.watched_runs <= self.waits

    def record(self, run, device):
        self.recorded += 1
        cache = run.keywords["past_key_values"]
        state = [t for layer in cache.layers for t in tensors_of(layer)]
        before = [t.clone() for t in state]
        result = mapped(run(), lambda one: one.clone() if isinstance(one, torch.Tensor) else one)
        for tensor, one in zip(state, before, strict=True):
            tensor.copy_(one)
        for tensor in buffers(result):
            tensor.fill_(float("nan"))  # nothing was computed

        def replay():
            self.replays += 1
            for held, made in zip(buffers(result), buffers(run()), strict=True):
                held.copy_(made)

        return replay, result


def buffers(value):
    return [one for _, one in leaves("", value) if isinstance(one, torch.Tensor)]


def tensors_of(layer):
    kept = getattr(layer, "recorded", lambda: [layer.keys, layer.values, layer.cumulative_length])
    return kept()
