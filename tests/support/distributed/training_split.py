"""Layers that train in low precision, split over ranks; also shared by FSDP2 with others, and repeated by others (HSDP).

Every operand of every product is this rank's part of one process's, bit for bit; outputs and gradients are equal where float32
holds the sums of both in any order, and else as close as two roundings of a sum are.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from ao_lab import (
    convert_for_training_,
    precompute_float8_dynamic_scale_for_fsdp,
)
from ao_lab.training import autograd
from ao_lab.training.tensor_parallel import (
    AXES,
    LowPrecisionColwiseParallel,
    LowPrecisionRowwiseParallel,
)
from reference import Quantized
from tests.support.distributed.ranks import DEVICE, DTYPE
from tests.support.distributed.training import batch, blocks, content, loss_of, shard

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "bf16")
POWERS_OF_TWO = ("rowwise", "blockwise", "mxfp8")
#: Operands of the products in the order in which a layer computes them.
ORDER = (("x", "w"), ("g", "w.T"), ("g.T", "x.T"))


class Feed(nn.Module):
    """Weights of one and minus one: float32 holds all sums, in any order."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)
        for place, parameter in enumerate(self.parameters()):
            parameter.data = random(*parameter.shape, seed=place).sign()

    def forward(self, x):
        return self.down(nn.functional.relu(self.up(x)))


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


class Operands:
    """What products are given, in their order."""

    def __enter__(self):
        self.seen, self.product = [], autograd.product

        def spy(direction, a, b, *args, **kwargs):
            self.seen.append((a, b))
            return self.product(direction, a, b, *args, **kwargs)

        autograd.product = spy
        return self.seen

    def __exit__(self, *error):
        autograd.product = self.product


def part(matrix, axes, axis):
    """This rank's part of what one process has."""
    if axis not in axes:
        return matrix
    return matrix.chunk(dist.get_world_size(), axes.index(axis))[dist.get_rank()]


def assert_part(found, whole, which, axis, recipe):
    if not isinstance(whole, Quantized):
        assert torch.equal(found, part(whole, AXES[which], axis)), (recipe, which)
        return
    assert torch.equal(found.codes, part(whole.codes, AXES[which], axis)), (recipe, which)
    split = axis in AXES[which] and whole.scale.dim() and whole.scale.shape[AXES[which].index(axis)] > 1
    scale = part(whole.scale, AXES[which], axis) if split else whole.scale
    assert torch.equal(found.scale, scale), (recipe, which)


def mine(t, dim=0):
    return t.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def step(net, x, g):
    """Operands, output and the input's gradient."""
    leaf = x.clone().requires_grad_()
    with Operands() as seen:
        y = net(leaf)
        y.backward(g)
    return seen, y.detach(), leaf.grad


def compare_layer(recipe, axis, mesh):
    """A layer alone, whose operands are those of its inputs."""
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(256, 512)).to(DEVICE, DTYPE)
    convert_for_training_(one, recipe)
    many = copy.deepcopy(one)
    style = LowPrecisionColwiseParallel() if axis == "N" else LowPrecisionRowwiseParallel()
    parallelize_module(many, mesh, {"0": style})
    # Rows and columns of different magnitudes, so that scales of parts are others.
    x, g = (random(128, n, seed=n) * torch.linspace(0.1, 9, n).to(DEVICE, DTYPE) for n in (256, 512))
    expected, y, dx = step(one, x, g)
    found, part_y, part_dx = step(many, x if axis == "N" else mine(x, 1), mine(g, 1) if axis == "N" else g)
    # Alone, a layer of which nothing is quantized is torch's own.
    for pair, wanted, names in zip(found, expected, ORDER, strict=True) if expected else ():
        for a, b, name in zip(pair, wanted, names, strict=True):
            assert_part(a, b, name, axis, recipe)
    y, dx = (mine(y, 1), dx) if axis == "N" else (y, mine(dx, 1))
    for a, b in ((part_y, y), (part_dx, dx), (many[0].weight.grad.full_tensor(), one[0].weight.grad)):
        share = 1e-4 if torch.float32 == DTYPE else 0.02
        assert torch.allclose(a, b, rtol=share, atol=share * float(b.abs().max())), (recipe, axis)


def compare_feed(recipe, mesh, sequence):
    """Both styles after one another, tokens split beside them or not."""
    one = Feed()
    convert_for_training_(one, recipe)
    many = copy.deepcopy(one)
    layout = Shard(0) if sequence else None
    styles = {
        "up": LowPrecisionColwiseParallel(input_layouts=layout),
        "down": LowPrecisionRowwiseParallel(output_layouts=layout),
    }
    parallelize_module(many, mesh, styles)
    x, g = (random(256, 256, seed=seed).sign() for seed in (5, 6))
    _, y, dx = step(one, x, g)
    y, dx = (mine(y), mine(dx)) if sequence else (y, dx)
    _, part_y, part_dx = step(many, *((mine(x), mine(g)) if sequence else (x, g)))
    assert torch.equal(part_y, y), recipe
    assert torch.equal(part_dx, dx), recipe
    for (name, a), b in zip(one.named_parameters(), many.parameters(), strict=True):
        assert torch.equal(b.grad.full_tensor(), a.grad), (recipe, name)


def refusals(mesh):
    def layer(recipe="rowwise", size=256, **options):
        net = nn.Sequential(nn.Linear(size, size)).to(DEVICE, DTYPE)
        convert_for_training_(net, recipe, **options)
        return net

    for net, message in (
        (layer("nvfp4"), "scale over the whole tensor"),
        (layer(size=16), "no multiple of 16"),
        (layer(fsdp_float8_all_gather=True), "without the FP8 all-gather"),
        (nn.Sequential(nn.Linear(32, 32)), "got Linear"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            parallelize_module(net, mesh, {"0": LowPrecisionColwiseParallel()})
    # torch's own style would find scales of parts.
    net = layer()
    parallelize_module(net, mesh, {"0": ColwiseParallel()})
    with pytest.raises(TypeError, match="LowPrecisionColwiseParallel"):
        net(random(32, 256, seed=0))


def tensor_parallel():
    mesh = dist.device_mesh.init_device_mesh(DEVICE, (dist.get_world_size(),))
    for recipe in RECIPES:
        for axis in "NK":
            compare_layer(recipe, axis, mesh)
    for recipe in POWERS_OF_TWO if torch.float32 == DTYPE else ():  # bfloat16 does not hold these sums
        for sequence in (False, True):
            compare_feed(recipe, mesh, sequence)
    refusals(mesh)


def compare_shared(recipe, mesh):
    one = Feed()
    convert_for_training_(one, recipe)
    many = copy.deepcopy(one)
    styles = {"up": LowPrecisionColwiseParallel(), "down": LowPrecisionRowwiseParallel()}
    parallelize_module(many, mesh["split"], styles)
    fully_shard(many, mesh=mesh["shared"])
    batches = [random(256, 256, seed=seed).sign() for seed in range(mesh["shared"].size())]
    expected = [one(x) for x in batches]
    for y in expected:
        y.sum().backward()
    mine = mesh["shared"].get_local_rank()
    found = many(batches[mine])
    found.sum().backward()
    assert torch.equal(found, expected[mine]), recipe
    for (name, a), b in zip(one.named_parameters(), many.parameters(), strict=True):
        assert torch.equal(b.grad.full_tensor(), a.grad / len(batches)), (recipe, name)


def compare_repeated(recipe, mesh):
    """The same batch everywhere, so that the mean of gradients is each of them."""
    one, many = (blocks() for _ in range(2))
    for net in (one, many):
        convert_for_training_(net, recipe, fsdp_float8_all_gather=True)
    shard(many, mesh=mesh)
    for step in range(2):
        loss_of(one, batch(0, step)).backward()
        loss_of(many, batch(0, step)).backward()
        for a, b in zip(one.parameters(), many.parameters(), strict=True):
            assert torch.equal(content(b.grad), a.grad), recipe
            with torch.no_grad():
                content(a).mul_(0.5)
                b.mul_(0.5)
        precompute_float8_dynamic_scale_for_fsdp(many)
        for net in (one, many):
            net.zero_grad()


def two_dimensions():
    mesh = dist.device_mesh.init_device_mesh(
        "cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("shared", "split")
    )
    for recipe in POWERS_OF_TWO:
        compare_shared(recipe, mesh)
    for recipe in ("tensorwise", "rowwise"):
        compare_repeated(recipe, mesh)
