"""Two processes that share a model by FSDP2, its linear layers quantized; run by test_sharding.

    python tests/support/distributed/fsdp_ranks.py RANKS

Prints "equal" where outputs, gradients and the gathered state are those of one process.
"""

import copy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from ao_lab import SchemeConfig, quantize_
from tests.support.distributed.ranks import start_ranks

UNEQUAL = ("int4_g32_asymmetric", "fp8_tensorwise", "nvfp4", "int8_rowwise")
SCHEMES = ("int4_g32_asymmetric", "fp8_tensorwise", "nvfp4", "nf4")


class Adapted(nn.Module):
    """A frozen layer and what trains beside it."""

    def __init__(self, width):
        super().__init__()
        self.base = nn.Linear(width, width)
        self.down = nn.Linear(width, 4, bias=False)
        self.up = nn.Linear(4, width, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def model(scheme):
    torch.manual_seed(0)
    made = nn.Sequential(Adapted(256), nn.SiLU(), Adapted(256))
    quantize_(made, SchemeConfig(scheme=scheme), lambda module, name: name.endswith("base"))
    return made


def compare_unequal(scheme, mesh):
    """Rows that the ranks do not divide, and fewer rows than ranks."""
    for rows in (9, 1):
        one = nn.Sequential(nn.Linear(256, rows))
        quantize_(one, SchemeConfig(scheme=scheme))
        many = copy.deepcopy(one)
        fully_shard(many[0], mesh=mesh)
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            assert torch.equal(many(x), one(x)), (scheme, rows)
        many[0].reshard()
        whole = get_model_state_dict(many, options=StateDictOptions(full_state_dict=True))
        assert torch.equal(whole["0.weight"], one[0].weight), (scheme, rows)


def run():
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for scheme in SCHEMES:
        compare(scheme, mesh)
    for scheme in UNEQUAL:
        compare_unequal(scheme, mesh)


def compare(scheme, mesh):
    one = model(scheme)
    many = copy.deepcopy(one)
    for layer in (many[0], many[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(many, mesh=mesh)
    shard = many[0].base.weight.to_local()
    assert shard.codes.shape[0] == one[0].base.weight.codes.shape[0] // mesh.size(), scheme
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        expected, got = one(x), many(x)
        assert torch.equal(got, expected), scheme
        expected.square().sum().backward()
        got.square().sum().backward()
        for (name, a), b in zip(one.named_parameters(), many.parameters(), strict=True):
            if a.requires_grad:
                # The same gradient on every rank, averaged over the ranks.
                assert torch.equal(b.grad.full_tensor(), a.grad), (scheme, name)
        for both in (one, many):
            both.zero_grad()


if __name__ == "__main__":
    start_ranks(run)
