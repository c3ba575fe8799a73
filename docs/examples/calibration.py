"""
Calibration
===========

Rounding to nearest looks at weights alone. Methods that see data do better: here a small network is quantized to 3 bits, with
and without them, and its outputs are compared on data that no method saw.
"""

import copy

import torch

import ao_lab

torch.manual_seed(0)
mixing = torch.randn(64, 64) / 8  # correlated inputs, as in real models


def batch():
    return torch.randn(256, 64) @ mixing


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(x)))


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


model = Network()
batches, held_out = [batch() for _ in range(4)], batch()
with torch.no_grad():
    expected = model(held_out)

# %%
# The same configuration with five sets of methods. Each gets the same batches.

config = ao_lab.IntxWeightOnlyConfig("int3", ao_lab.PerGroup(32))
methods = {
    "rounding": (),
    "Clip": (ao_lab.Clip(),),
    "GPTQ": (ao_lab.GPTQ(),),
    "Clip + GPTQ": (ao_lab.Clip(), ao_lab.GPTQ()),
    "AWQ + Clip + GPTQ": (ao_lab.AWQ(), ao_lab.Clip(), ao_lab.GPTQ()),
}
for name, chosen in methods.items():
    quantized = copy.deepcopy(model)
    options = {"calibration": batches, "methods": chosen} if chosen else {}
    report = ao_lab.quantize_(quantized, config, **options)
    with torch.no_grad():
        error = (quantized(held_out) - expected).norm() / (expected - held_out).norm()
    print(f"{name:18} relative error of the output {error:.3f}")

# %%
# AWQ changes nothing here: it scales channels of one layer and divides those of the next, which needs a path between them that
# such a factor passes unchanged, and SiLU is none.
#
# The report of the last one says what was done to each layer.

print(report)
