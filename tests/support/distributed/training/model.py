"""The model and the batches of the scripts that train on several ranks."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.support.distributed.ranks import DEVICE, DTYPE

WIDTH = 64


class Block(nn.Module):
    """Two layers and what they are added to."""

    recomputed = False

    def __init__(self, bias):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.recomputed else self.inner(x))

    def inner(self, x):
        return self.down(nn.functional.silu(self.up(x)))


def blocks(count=2, bias=True):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(bias) for _ in range(count))).to(DEVICE, DTYPE)


def batch(rank, step):
    made = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    return made.to(DEVICE, DTYPE)


def loss_of(net, x):
    return net(x).float().square().mean()


def shard(net, **options):
    for block in net:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def content(t):
    """The whole plain tensor of a parameter or a gradient."""
    t = t.detach()
    t = t.full_tensor() if hasattr(t, "full_tensor") else t
    return getattr(t, "dense", t)


class Traffic(TorchDispatchMode):
    """Bytes that this rank gives to collectives, and how often, by their names."""

    def __init__(self):
        super().__init__()
        self.bytes, self.calls = {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            sent = args[1] if name == "_allgather_base_" else args[0]
            tensors = [t for t in (sent if isinstance(sent, list) else [sent]) if isinstance(t, torch.Tensor)]
            self.calls[name] = self.calls.get(name, 0) + 1
            self.bytes[name] = self.bytes.get(name, 0) + sum(t.nbytes for t in tensors)
        return func(*args, **(kwargs or {}))
