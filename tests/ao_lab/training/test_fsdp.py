"""Weights that FSDP2 gathers as codes: in one process, before they are shared; and on several ranks the bits of one process."""

import copy
import inspect
import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import ao_lab
import fast
from ao_lab.tensor.quantized_tensor import quantized
from ao_lab.testing.strategies import assert_same_quantized
from ao_lab.training import fsdp as hooks
from ao_lab.training.autograd import training_linear
from ao_lab.training.casts import weight_columns, weight_rows
from ao_lab.training.fsdp import (
    GatheredLinear,
    _remember_scales,
    gather_recipe,
    weight_rows_everywhere,
)
from ao_lab.training.scales_over_ranks import magnitudes, scales_of
from ao_lab.training.shard import CastOnGather, tell
from fast.launch.launcher import ALIGNMENT
from reference import SCHEMES
from reference.training.linear import operands
from reference.training.recipe import RECIPES
from tests.support import cublaslt
from tests.support.distributed.ranks import check_on_ranks, run_on_ranks
from tests.support.refusals import refused

CHECKPOINTS = "checkpoints.run"
GATHERED = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64, bias=False))


def converted(recipe="tensorwise"):
    net = model()
    report = ao_lab.convert_for_training_(net, recipe, fsdp_float8_all_gather=True)
    return net, report


def step(net, x):
    net.zero_grad()
    y = net(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in net.parameters())]


def test_the_parameter_stays_the_same_object():
    net = model()
    weight, optimizer = net[0].weight, torch.optim.AdamW(net.parameters())
    ao_lab.convert_for_training_(net, "tensorwise", fsdp_float8_all_gather=True)
    assert net[0].weight is weight
    assert isinstance(weight, CastOnGather)
    assert isinstance(weight, nn.Parameter)
    assert optimizer.param_groups[0]["params"][0] is weight


@pytest.mark.parametrize("recipe", GATHERED)
def test_not_sharded_it_trains_as_the_recipe_says(recipe, monkeypatch):
    """And by operands that a GPU takes."""
    asked = cublaslt.watch(monkeypatch)
    net, report = converted(recipe)
    plain = model()
    ao_lab.convert_for_training_(plain, report.recipe)
    x = torch.randn(32, 64)
    for a, b in zip(step(net, x), step(plain, x), strict=True):
        assert torch.equal(a, b)
    assert len(asked) == {"tensorwise": 10, "rowwise": 10, "rowwise_with_gw_hp": 6}.get(recipe, 0)
    with torch.inference_mode():
        assert torch.equal(net(x), plain(x))


@pytest.mark.parametrize("recipe", GATHERED)
def test_codes_serve_both_products(recipe):
    """The operands of the reference, made of codes that arrived."""
    record = gather_recipe(RECIPES[recipe])
    w, g = torch.randn(64, 96).bfloat16(), torch.randn(32, 64).bfloat16()
    arrived = quantized(w, record.output.b.scheme)
    x = torch.randn(32, 96).bfloat16()
    _, rows = operands("output", record, x=x, w=w)
    _, columns = operands("input_grad", record, g=g, w=w)
    assert_same_quantized(weight_rows(arrived, record.output.b), rows)
    assert_same_quantized(weight_columns(arrived, record.output.b, record.input_grad.b), columns)


@pytest.mark.parametrize("recipe", GATHERED)
def test_nothing_of_the_whole_weight_is_kept_but_itself(recipe):
    """FSDP2 frees what it gathered between the passes; a copy of it would stay."""
    record = gather_recipe(RECIPES[recipe])
    w = nn.Parameter(quantized(torch.randn(64, 96).bfloat16(), record.output.b.scheme))
    x = torch.randn(32, 96).bfloat16().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = training_linear(x, w, None, record)
    assert [t is w for t in kept if set(t.shape) == {64, 96}] == [True]
    y.float().sum().backward()
    assert type(w.grad) is torch.Tensor
    assert w.grad.dtype == torch.bfloat16


def test_powers_of_two_lose_nothing_on_the_way():
    """w.T's codes stand for the values of w's, but where the second rounding underflows: here nowhere."""
    record, w = gather_recipe(RECIPES["rowwise"]), torch.rand(256, 256) + 0.1
    arrived = quantized(w, record.output.b.scheme)
    columns = weight_columns(arrived, record.output.b, record.input_grad.b)
    assert torch.equal(fast.dequantize(columns).t(), arrived.dequantize())


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("bf16", "not quantized"),
        ("blockwise", "span rows"),
        ("nvfp4", "needs more than its own block"),
        ("mxfp4", "no format of 8 bits"),
    ],
)
def test_recipes_that_cannot(recipe, reason):
    net = model()
    refused(ValueError, reason, ao_lab.convert_for_training_, net, recipe, fsdp_float8_all_gather=True)
    assert type(net[0]) is nn.Linear


def test_torchaos_configuration():
    config = ao_lab.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    net = ao_lab.convert_to_float8_training(model(), config=config)
    assert type(net[0]) is GatheredLinear
    row = ao_lab.CastConfig(scaling_granularity=ao_lab.ScalingGranularity.AXISWISE)
    config = ao_lab.Float8LinearConfig(cast_config_weight=row, enable_fsdp_float8_all_gather=True)
    refused(ValueError, "no powers of two", ao_lab.convert_to_float8_training, model(), config=config)


def test_files_hold_plain_tensors():
    net, _ = converted()
    stored = io.BytesIO()
    torch.save(net.state_dict(), stored)
    stored.seek(0)
    state = torch.load(stored, weights_only=True)
    assert {type(t) for t in state.values()} == {torch.Tensor}
    plain = model()
    plain.load_state_dict(state)
    for assign in (False, True):
        other, _ = converted()
        other.load_state_dict({name: t + 1 for name, t in state.items()}, assign=assign)
        assert isinstance(other[0].weight, CastOnGather)
        assert torch.equal(other[0].weight.dense, plain[0].weight + 1)


def test_whole_modules_in_files():
    net, _ = converted()
    stored = io.BytesIO()
    torch.save(net, stored)
    stored.seek(0)
    again = torch.load(stored, weights_only=False)
    assert isinstance(again[0].weight, CastOnGather)
    assert again[0].weight.requires_grad
    x = torch.randn(4, 64)
    assert torch.equal(again(x), net(x))
    assert "trains by recipe" in str(ao_lab.explain(again))


def test_copies():
    net, _ = converted()
    x = torch.randn(4, 64)
    again = copy.deepcopy(net)
    assert isinstance(again[0].weight, CastOnGather)
    assert torch.equal(again(x), net(x))
    with torch.no_grad():
        again[0].weight.zero_()
    assert net[0].weight.dense.any()
    assert isinstance(net.to(torch.bfloat16)[0].weight, CastOnGather)
    assert net[0].weight.dense.dtype == torch.bfloat16


def test_copies_of_views():
    """Of rows too, which begin inside of the memory; what shared memory does so again, and counts together."""
    weight = nn.Parameter(CastOnGather(torch.randn(8, 4), SCHEMES["fp8_tensorwise"]))
    weight.grad, weight.role = torch.ones(8, 4), ["a"]
    again = copy.deepcopy(weight)
    assert isinstance(again, nn.Parameter)
    assert torch.equal(again.grad, weight.grad)
    assert (again.role, again.role is weight.role) == (["a"], False)
    shard = weight.detach()
    for view in (shard[5], shard[2:4], shard.t()):
        whole, part = copy.deepcopy([shard, view])
        assert type(part) is CastOnGather
        assert torch.equal(part.dense, view.dense)
        part.zero_()
        assert (whole.dense == 0).sum() == view.numel()
        assert (whole.known.writes, shard.known.writes) == (1, 0)
    with pytest.raises(RuntimeError, match="created explicitly"):
        copy.deepcopy(weight[1])


def test_what_is_made_of_a_weight_is_plain():
    weight = CastOnGather(torch.randn(8, 4), SCHEMES["fp8_tensorwise"])
    for made in (torch.zeros_like(weight), weight + 1, weight.abs(), weight @ weight.t()):
        assert type(made) is torch.Tensor
    views = (weight.detach(), weight[2:4], weight[1], weight.t(), weight.view(-1), *weight.unbind(1))
    for same in (*views, weight.clone(), weight.new_zeros(3, 4)):
        assert type(same) is CastOnGather
    assert all(view.known is weight.known for view in views)
    assert weight.clone().known is not weight.known


def test_every_write_is_counted():
    weight = CastOnGather(torch.randn(8, 4), SCHEMES["fp8_tensorwise"])
    for write in (
        lambda: weight.mul_(2),
        lambda: weight[2:4].zero_(),
        lambda: weight[5].fill_(3.0),
        lambda: weight.t()[0].mul_(2),
        lambda: weight.data[1].add_(1),
        lambda: weight.view(-1).add_(1),
        lambda: weight.detach().copy_(torch.ones(8, 4)),
        lambda: torch._foreach_add_([weight], 1.0),
    ):
        before = weight.known.writes
        write()
        assert weight.known.writes > before
    assert torch.equal(weight.dense, torch.full((8, 4), 2.0))


def test_a_shard_that_is_read_is_as_old_as_before():
    """One rank may read alone (into a buffer, an average): scales of its weight are those that the others have."""
    weight = CastOnGather(torch.randn(8, 4), SCHEMES["fp8_tensorwise"])
    for read in (
        lambda: torch.empty(8, 4).copy_(weight),
        lambda: torch.zeros(8, 4).lerp_(weight, 0.5),
        lambda: torch.zeros(4).add_(weight[1]),
        lambda: torch.add(weight, 1, out=torch.empty(8, 4)),
        lambda: torch._foreach_copy_([torch.empty(8, 4)], [weight]),
        lambda: weight[1].numpy().sum(),
    ):
        read()
        assert weight.known.writes == 0
    torch.add(torch.ones(8, 4), 1, out=weight)
    assert weight.known.writes == 1


def test_values_outside_of_torch():
    """Those of plain tensors, of rows and transposes too; what nobody would count cannot be written."""
    weight = CastOnGather(torch.randn(8, 4), SCHEMES["fp8_tensorwise"])
    for one, plain in ((weight, weight.dense), (weight[1], weight.dense[1]), (weight.t(), weight.dense.t())):
        assert np.array_equal(np.asarray(one), plain.numpy())
        assert one.tolist() == plain.tolist()
        with pytest.raises(ValueError, match="read-only"):
            one.numpy()[0] = 1
    assert f"{weight[1, 2]:.3f}" == f"{weight.dense[1, 2]:.3f}"
    with pytest.raises(RuntimeError, match="detach"):
        nn.Parameter(weight).numpy()
    assert torch.equal(torch.from_dlpack(weight[1]), weight.dense[1])
    assert weight.known.writes == 1


def test_tied_weights():
    """Two converted layers share the weight after as before; a table that is looked up in keeps its own."""
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False), nn.Embedding(96, 64))
    net[1].weight = net[0].weight
    net.append(nn.Linear(64, 96, bias=False))
    net[3].weight = net[2].weight
    report = ao_lab.convert_for_training_(net, "tensorwise", fsdp_float8_all_gather=True)
    assert net[0].weight is net[1].weight
    assert isinstance(net[0].weight, CastOnGather)
    assert net[3].weight is net[2].weight
    assert type(net[3].weight) is nn.Parameter
    assert set(report.gathered_whole) == {"3"}
    assert "3  gathered in its own dtype" in str(report)


def test_back_again():
    net, _ = converted()
    weight = net[0].weight
    assert ao_lab.convert_from_training_(net) == ("0", "2")
    assert net[0].weight is weight
    assert type(net[0].weight) is nn.Parameter
    assert torch.equal(weight, model()[0].weight)


def test_a_weight_that_a_graph_holds():
    net = model()
    y = net(torch.randn(2, 64))
    with pytest.raises(ValueError, match="held by the graph"):
        ao_lab.convert_for_training_(net, "tensorwise", fsdp_float8_all_gather=True)
    assert type(net[0]) is nn.Linear
    assert all(type(p) is nn.Parameter for p in net.parameters())
    y.sum().backward()
    assert net[0].weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_of_magnitudes_are_those_of_tensors(dtype):
    scheme = SCHEMES["fp8_tensorwise"]
    tensors = [torch.randn(5, 3) * 10.0**power for power in range(-8, 4)]
    tensors += [torch.zeros(2, 3), torch.full((2, 3), float("nan")), torch.tensor([[1.0, float("inf"), 2.0]])]
    tensors += [torch.empty(0, 3)]
    tensors = [t.to(dtype) for t in tensors]
    found = scales_of(magnitudes(tensors), scheme, dtype)
    wanted = [fast.choose_scales(t, scheme).scale for t in tensors[:-1]]
    assert torch.equal(found[:-1].view(torch.int32), torch.stack(wanted).view(torch.int32))
    assert found[-1] == found[-4]  # no elements: as of zeros


def test_ranks_without_rows():
    assert [weight_rows_everywhere(rows, 4) for rows in (4, 5, 6, 7, 8, 9, 10, 3)] == [
        True, False, False, True, True, False, True, False,
    ]  # fmt: skip


class Mesh:
    """Two ranks, of which none is asked for anything."""

    def size(self):
        return 2


@pytest.mark.parametrize("write", [lambda w: w.mul_(2), lambda w: torch._foreach_add_([w], 1.0)])
def test_a_shard_is_quantized_once_until_it_is_written_to(write, monkeypatch):
    weight = CastOnGather(torch.randn(8, 64).bfloat16(), RECIPES["rowwise"].output.b.scheme)
    policy, mesh, made = MixedPrecisionPolicy(), Mesh(), []
    quantize = fast.quantize
    monkeypatch.setattr(fast, "quantize", lambda *a, **k: made.append(1) or quantize(*a, **k))

    def sent(dtype=None, whole=(16, 64)):
        policy_of = MixedPrecisionPolicy(param_dtype=dtype) if dtype else policy
        return weight.fsdp_pre_all_gather(mesh, torch.Size(whole), (64, 1), nn.Module(), policy_of)

    first = sent()
    assert sent() is first
    assert sent(torch.float32) is not first
    assert len(made) == 2
    write(weight)
    assert weight.known.sent is None  # its memory is the optimizer's
    parts, kept = sent()
    wanted = quantize(weight.dense, weight.scheme)
    assert_same_quantized(kept[0], wanted)
    assert torch.equal(parts[0], wanted.codes)
    assert len(made) == 3
    weight.dense.add_(1)
    assert sent()[1] is not kept
    assert len(inspect.signature(weight.fsdp_pre_all_gather).parameters) == 5


@pytest.mark.parametrize("write", [lambda w: w[0].fill_(2), lambda w: w.t().mul_(2)])
def test_writes_to_a_row_are_seen(write):
    """Views that are read, and other operations, leave what was sent."""
    weight = CastOnGather(torch.randn(8, 64), RECIPES["rowwise"].output.b.scheme)
    given = Mesh(), torch.Size((16, 64)), (64, 1), nn.Module(), MixedPrecisionPolicy()
    first = weight.fsdp_pre_all_gather(*given)
    assert weight[2:4].sum() + weight[1].sum() + weight.view(-1).sum() + (weight * 2).sum() != 0
    assert weight.fsdp_pre_all_gather(*given) is first
    for _ in range(2):
        write(weight)
        (codes, *_), _ = weight.fsdp_pre_all_gather(*given)
        assert torch.equal(codes, fast.quantize(weight.dense, weight.scheme).codes)


def test_a_collective_is_taken_for_a_write():
    known = CastOnGather(torch.ones(2, 2), SCHEMES["fp8_rowwise"]).known
    for func, left in (
        (torch.ops.c10d.allreduce_.default, None),
        (torch.ops.aten.add.Tensor, "what was sent"),
    ):
        known.sent = "what was sent"
        tell(known, func)
        assert known.sent == left


def test_nothing_is_sent_again_that_a_cuda_graph_writes(monkeypatch):
    """Its replays are not seen; nor is a gather captured without what it sends."""
    weight = CastOnGather(torch.randn(8, 64), RECIPES["rowwise"].output.b.scheme)
    given = Mesh(), torch.Size((16, 64)), (64, 1), nn.Module(), MixedPrecisionPolicy()
    first = weight.fsdp_pre_all_gather(*given)
    with monkeypatch.context() as patch:
        patch.setattr(hooks, "is_captured", lambda x: True)
        assert weight.fsdp_pre_all_gather(*given) is not first
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        weight.mul_(2)
    assert weight.fsdp_pre_all_gather(*given) is not weight.fsdp_pre_all_gather(*given)


def test_precomputed_scales_lie_where_kernels_read_at_once():
    weights = [CastOnGather(torch.full((2, 2), float(n + 1)), SCHEMES["fp8_tensorwise"]) for n in range(3)]
    _remember_scales(weights, torch.tensor([1.0, 2.0, 3.0]))
    wanted = [fast.choose_scales(weight.dense, weight.scheme).scale for weight in weights]
    assert [weight.known.scale for weight in weights] == wanted
    assert {weight.known.scale.data_ptr() % ALIGNMENT for weight in weights} == {0}


def test_precompute_needs_no_sharded_model():
    ao_lab.precompute_float8_dynamic_scale_for_fsdp(converted()[0])


def test_fsdp_on_ranks():
    """Codes or values gathered, uneven shards, accumulation, recomputation, mixed precision; bytes and reductions counted."""
    check_on_ranks("training.fsdp")


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8", "steps"])
def test_fsdp_compiled(recipe):
    check_on_ranks("training.fsdp", recipe)


def test_tensor_parallelism():
    """Operands are parts of those of one process, bit for bit."""
    check_on_ranks("training_split.tensor_parallel")


@pytest.mark.nightly
def test_tensor_parallelism_beside_fsdp():
    """Four ranks, two by two."""
    check_on_ranks("training_split.two_dimensions", ranks=4)


@pytest.mark.nightly
@pytest.mark.parametrize("place", ["backward", "save"])
def test_a_rank_that_dies_leaves_a_checkpoint(place, tmp_path):
    """It loads, also into layers of other kinds, and training goes on as if nothing had been."""
    killed = run_on_ranks(CHECKPOINTS, tmp_path, place, 2)
    assert killed.returncode != 0
    assert "SIGKILL" in killed.stderr
    assert len(list(tmp_path.glob("step_*/.metadata"))) == (2 if place == "backward" else 1)
    check_on_ranks(CHECKPOINTS, tmp_path)


def test_operations_that_write_are_counted_where_they_write():
    """By whichever way they are dispatched: what was written has an old scale, what was read has not."""
    read, written = (CastOnGather(torch.full((4, 4), float(n)), SCHEMES["fp8_tensorwise"]) for n in (1, 2))
    assert written.mul_(2) is written
    assert written.copy_(read) is written
    torch._foreach_add_([written], [read])
    assert (read.known.writes, written.known.writes) == (0, 3)
    assert torch.equal(written.dense, torch.full((4, 4), 2.0))
    plain = torch.zeros(4, 4)
    assert plain.add_(written) is plain
    assert torch.equal(plain, written.dense)
