"""Floors by hand, what checkpointing keeps, and rows of single layers without a GPU."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import ao_lab
from ao_lab.gemm import choices
from ao_lab.measure.turns import AGAIN, Plan, Span
from experiments.fp8_training import blocks, linear
from experiments.fp8_training.convergence_page import of_fsdp
from experiments.fp8_training.linear import (
    CELL_FORCED,
    CELL_PLAIN,
    CELL_TUNED,
    CellTimes,
    Rates,
    floor_seconds,
    time_cell,
)
from experiments.fp8_training.methods import OURS, PLAIN, SUMMED_FAST, Method, with_fast_sums
from experiments.harness.bench import SETTLE, SINGLE, after_pause, steady, steady_eager
from experiments.harness.cuda_graph import compiled_runs
from experiments.harness.measuring import Deadline, Wrong, status
from experiments.report.results import Results, Where
from reference.training.recipe import PRODUCTS, recipe_of
from tests.experiments.harness.tiny import FakeWatch

# A cell's three sides compute the same layer, are timed, and leave no choice behind.


def test_a_cell(tmp_path, monkeypatch):
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path))
    monkeypatch.setattr("ao_lab.tuning.measure.SECONDS", 0.0)
    monkeypatch.setattr(linear, "SECONDS", 0.0)
    choices.forget()
    found = time_cell((32, 64, 48), device="cpu")
    assert set(found.gpu) == set(found.host) == {CELL_PLAIN, CELL_FORCED, CELL_TUNED}
    assert found.low == "output+input_grad+weight_grad"  # without FP8 units all of it is emulated
    assert min(found.gpu.values()) > 0
    assert found.tuning > 0
    assert not list(choices.choices_for(torch.device("cpu")))
    assert not list(tmp_path.iterdir())
    choices.forget()


def test_speed():
    times = CellTimes({CELL_PLAIN: 2.0, CELL_FORCED: 4.0, CELL_TUNED: 1.0}, {}, "dense", 0.0)
    assert (times.speed(CELL_FORCED), times.speed(CELL_TUNED)) == (0.5, 2.0)
    assert times.speed(CELL_TUNED, CELL_FORCED) == pytest.approx(4.0)


# The part on two ranks: bytes of the stand-in, what is said without GPUs, and where ranks fail.

OK = next(iter(status("ok")))


def test_float8_halves_what_is_gathered():
    """Codes of a byte, and a scale for each weight or row; gradients are reduced as they were."""
    case = replace(blocks.STAND_IN, rounds=1)
    found = {side: values for (_, side), values in blocks.fsdp_measure(case, 0).items()}
    assert list(found) == [side.name for side in blocks.SIDES]
    assert all(OK in values for values in found.values()), found
    gathered = {name: values["all-gather"][0] for name, values in found.items()}
    reduced = {values["reduce-scatter"][0] for values in found.values()}
    assert len(reduced) == 1
    for side in blocks.SIDES:
        part = gathered[side.name] / gathered["bfloat16"]
        assert 0.5 < part < 0.52 if side.codes else part == 1
        assert ("speed over bfloat16 all-gather" in found[side.name]) == side.codes


def test_ranks_that_fail_are_said_to(capfd):
    """Every side has the status, and nothing else."""
    case = replace(blocks.STAND_IN, length=-1)
    found = blocks.fsdp_measure(case, 0)
    assert len(found) == len(blocks.SIDES)
    for values in found.values():
        (name,) = values
        assert name.startswith("status: error: ProcessRaisedException")


@pytest.mark.parametrize(("count", "reason"), [(0, "found 0"), (1, "found 1"), (2, None)])
def test_one_gpu_is_not_enough(count, reason, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    missing = blocks.TWO_GPUS.missing()
    assert missing is None if reason is None else reason in missing
    assert blocks.STAND_IN.missing() is None


def test_targets():
    """Speed and bytes of each recipe on GPUs; a CPU has none."""
    data = blocks.TWO_GPUS.shape.name
    names = [target.name for target in of_fsdp(Where("full", "NVIDIA H200", data), Results([]))]
    assert len(names) == 4
    assert not of_fsdp(Where("quick", "cpu", data), Results([]))


# Rows are called compiled where something was.


def layer():
    torch.compiler.reset()
    return nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))


def step(net):
    net.compile(backend="aot_eager")
    x = torch.randn(2, 8, requires_grad=True)
    net(x).sum().backward()
    with compiled_runs():
        net(x).sum().backward()


def test_a_step_that_is_not_compiled_is_no_row():
    """A forward that is a `functools.partial` runs operation by operation, without a word."""
    net = layer()
    net.forward = partial(checkpoint, net.forward, use_reentrant=False)
    with pytest.raises(Wrong, match="nothing was compiled"):
        step(net)


@pytest.mark.parametrize("kind", [blocks.PER_OP, pytest.param(blocks.FULL, marks=pytest.mark.nightly)])
def test_checkpointed_layers_are_compiled(kind):
    net = layer()
    blocks.apply([net], kind)
    step(net)


RATES = Rates(float8=2e3, bfloat16=1e3, copy=1e2)
MINE = Method(library=OURS, recipe="rowwise")


def test_floors_by_hand():
    m, k, n = 32, 64, 128
    one = 2 * m * k * n
    elements = m * k + k * n + m * n
    assert floor_seconds((m, k, n), "", RATES) == pytest.approx(3 * one / 1e3)
    # Two bytes read, one written in each of two layouts.
    assert floor_seconds((m, k, n), "rowwise", RATES) == pytest.approx(3 * one / 2e3 + 4 * elements / 1e2)
    # No Hopper multiplies MX blocks; elements of 4 bits take half a byte.
    assert floor_seconds((m, k, n), "mxfp4", RATES) == pytest.approx(3 * one / 1e3 + 3 * elements / 1e2)
    # The weight gradient is dense: its operands are not cast, x and g are written once.
    high = 2 * one / 2e3 + one / 1e3 + (3 * (m * k + m * n) + 4 * k * n) / 1e2
    assert floor_seconds((m, k, n), "rowwise_with_gw_hp", RATES) == pytest.approx(high)


def test_errors_and_times_of_a_layer():
    bench = linear.Bench.of("cpu", 0, Deadline(None))
    found = linear.measure(bench, (32, 64, 32), (PLAIN, MINE, Method(library=OURS, recipe="nothing")))
    assert {key[0] for key in found} == {linear.EAGER}
    plain, mine, failed = found.values()
    assert plain["time over bfloat16"] == (1.0, "ratio")
    assert all(one["time after a pause"][0] > 0 for one in (plain, mine))
    assert plain["error of the output"][0] < 0.004 < mine["error of the output"][0] < 0.06
    assert next(iter(failed)).startswith("status: error: ValueError: unknown recipe 'nothing'")
    late = linear.measure(linear.Bench.of("cpu", 0, Deadline(-1.0)), (32, 64, 32), (PLAIN,))
    assert [*late[linear.EAGER, "bfloat16"]] == ["status: not run: the -1 s of this run did not reach it"]


def test_a_wrong_product_gets_no_time(monkeypatch):
    monkeypatch.setattr(Method, "prepare", lambda self, model: model[0].weight.data.neg_())
    bench = linear.Bench.of("cpu", 0, Deadline(None))
    found = linear.measure(bench, (32, 64, 32), (PLAIN, MINE))[linear.EAGER, MINE.name]
    assert [*found] == ["status: wrong: the output differs by 2.000 of its size"]


def test_every_second_product_is_kept_in_both_passes():
    decide = blocks.policy()

    class Pass:
        def __init__(self, again):
            self.is_recompute = again

    mm, silu = torch.ops.aten.mm.default, torch.ops.aten.silu.default
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    kept = [decide(Pass(again), one) for again in (False, True) for one in (mm, silu, mm, attention, mm)]
    save, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    assert kept == [save, again, again, save, save] * 2
    with pytest.raises(ValueError, match="checkpointing is none"):
        blocks.apply([], "some")


@pytest.mark.parametrize("kind", [blocks.SECOND, blocks.PER_OP])
def test_checkpointed_layers_give_the_same_gradients(kind):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)) for _ in range(2)))
    x = torch.randn(4, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    blocks.apply(model, kind)
    assert torch.equal(torch.autograd.grad(model(x).sum(), x)[0], expected)


def test_groups_and_cells_are_those_of_the_published_tables():
    assert len(linear.CELLS) == 36 * 6
    assert len(linear.EAGER_CELLS) == 36 * 3
    assert {group.length for group in blocks.GPU_GROUPS if group.shape.layers == 2} == {4096, 8192}
    settings = [(group.shape.name, group.setting) for group in blocks.GPU_GROUPS]
    assert len(set(settings)) == len(settings)
    assert PLAIN.name == blocks.GPU_GROUPS[0].methods[0].name == "bfloat16"


@pytest.mark.parametrize("launches", ["graph", "eager"])
def test_a_cell_has_values_of_all_three_sides_or_says_why_not(monkeypatch, launches):
    asked, real = [], ao_lab.tune
    monkeypatch.setattr(
        ao_lab, "tune", lambda *given, **named: asked.append(named["launches"]) or real(*given, **named)
    )
    monkeypatch.setattr(linear, "SECONDS", 0.0)
    found = linear.grid_measure("cpu", 0, (32, 32, 32), launches)
    assert asked == [launches]
    assert [one.name for one in found] == ["bfloat16", linear.FORCED.name, linear.TUNED.name]
    assert found[PLAIN]["speed over bfloat16, kernels"][0] == 1.0
    assert all(values["time"][0] >= values["time of kernels"][0] > 0 for values in found.values())
    failed = linear.grid_measure("cpu", 0, (32, 32, 0), launches)
    assert all("status: ok" not in values and len(values) == 1 for values in failed.values())


class Heating(FakeWatch):
    """Each call takes its own time, and twice that where another call came just before it."""

    def __init__(self, times):
        super().__init__()
        self.times, self.last = times, ""

    def call(self, name):
        def run():
            self.now = self.times[name] * (1 if self.last == name else 2)
            self.last = name
            self.passed += self.now

        return run

    def seconds(self, calls, *, cold=False):
        found = []
        for call in calls:
            self.passed = 0.0
            call()
            found.append(self.passed)
        return found


@pytest.mark.parametrize("graph", [True, False])
def test_what_is_timed_comes_after_its_own_calls(graph):
    times = {"a": 1e-3, "b": 7e-3}
    watch, wrong = Heating(times), lambda: pytest.fail("the other form was called")
    spans = {}
    for name in times:
        call = watch.call(name)
        spans[name] = Span(1, call if graph else wrong, wrong if graph else call)
    found = steady(watch, spans, plan := Plan(rounds=3, warmup=1, seconds=10.0), graph=graph)
    assert found == {"a": [1e-3] * 3, "b": [7e-3] * 3, AGAIN: [1e-3] * 3}
    cold = steady(watch, spans, plan, 0.0, graph=graph)
    assert cold["b"] == [14e-3] * 3


def test_rounds_of_launches_one_by_one_keep_the_plans_seconds(monkeypatch):
    """Calls that settle the clock count."""
    clock = iter(range(0, 1000, 5))
    monkeypatch.setattr("experiments.harness.bench.time.perf_counter", lambda: float(next(clock)))
    watch = Heating({"a": 1e-3})
    found = steady_eager(
        watch, {"a": Span(1, None, watch.call("a"))}, Plan(rounds=40, warmup=1, seconds=10.0)
    )
    assert len(found["a"]) == max(Plan().fewest, 2)


class Queued(Heating):
    """Launches wait behind those that the GPU has not come to; a call whose host is late takes the host's time then alone, when
    none wait."""

    def __init__(self, times, host):
        super().__init__(times)
        self.host, self.waiting = host, 0.0

    def call(self, name):
        def run():
            hidden = min(self.waiting, self.host[name])
            self.waiting = max(0.0, self.waiting + self.times[name] - self.host[name])
            self.passed += max(self.times[name], self.host[name] - hidden)

        return run

    def sync(self):
        self.waiting = 0.0


def test_launches_one_by_one_do_not_hide_behind_another_method():
    """Dense steps are launched faster than they run; those of the next side are not, and it is they that are slow."""
    times, host = {"dense": 2e-3, "sparse": 1e-3}, {"dense": 0.1e-3, "sparse": 3e-3}
    watch = Queued(times, host)
    spans = {name: Span(1, None, watch.call(name)) for name in times}
    found = steady_eager(watch, spans, plan := Plan(rounds=3, warmup=1, seconds=10.0))
    assert found["sparse"] == [pytest.approx(3e-3)] * 3
    assert found["dense"] == found[AGAIN] == [2e-3] * 3
    assert steady(watch, spans, plan, 0.0, graph=False)["sparse"][0] < 3e-3


@pytest.mark.parametrize(("seconds", "before"), [(10e-3, 10), (40e-3, 3), (200e-3, 2)])
def test_calls_before_last_long_enough(seconds, before):
    made, watch = [], Heating({"a": seconds})
    timed, watch.last = watch.call("a"), "a"

    def call():
        made.append(1)
        timed()

    steady(watch, {"a": Span(1, call, call)}, Plan(rounds=1, warmup=0))
    # Two calls say how long one takes; then one is timed, twice.
    assert len(made) == 2 + 2 * (before + 1)
    assert before == 2 or before * seconds >= SETTLE


def test_fast_sums_have_a_name_and_a_record():
    """The recipe's own operands and key differ in nothing else."""
    fast, default = with_fast_sums("rowwise"), recipe_of("rowwise")
    assert [getattr(default, name).accumulation for name in PRODUCTS] == ["fast", "precise", "precise"]
    assert {getattr(fast, name).accumulation for name in PRODUCTS} == {"fast"}
    assert (fast.operands, fast.name) == (default.operands, "rowwise_fast_sums")
    method = Method(library=OURS, recipe="rowwise", fast_sums=True)
    assert method.name == "ours, rowwise, fast sums"
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    method.prepare(model)
    assert model[0].low_precision.recipe == fast


def test_fast_sums_stand_in_the_tables_of_a_gpu():
    names = [linear.label(one) for one in linear.all_methods("cuda")]
    assert len(set(names)) == len(names)
    assert {f"ours, {one}, fast sums" for one in SUMMED_FAST} < set(names)
    assert not any("fast sums" in one.name for one in linear.all_methods("cpu"))
    groups = {group.setting for group in blocks.GPU_GROUPS if any(one.fast_sums for one in group.methods)}
    assert groups == {f"{how}, 2 x 8192, checkpointing none" for how in (blocks.EAGER, blocks.COMPILED)}


def test_single_calls_come_after_a_pause():
    made = []

    class Watch(FakeWatch):
        def sync(self):
            made.append("sync")

        def seconds(self, calls, *, cold=False):
            assert cold
            made.append(calls[0]())
            return [1.0]

    calls = {"a": lambda: "a", "b": lambda: "b"}
    assert after_pause(Watch(), calls, 0.05, made.append) == {"a": [1.0] * SINGLE, "b": [1.0] * SINGLE}
    assert made == ["sync", 0.05, "a", "sync", 0.05, "b"] * SINGLE
    assert after_pause(Watch(), calls, 0.0, made.append) == {"a": [1.0], "b": [1.0]}


def test_graphs_of_small_layers_are_timed_singly_too(monkeypatch):
    """What is timed in a row is a graph of several calls; after a pause it is a graph of one."""
    captured, bench = [], linear.Bench.of("cpu", 0, Deadline(None))
    bench.plan = Plan(rounds=1, warmup=0, span=10.0, most_calls=4)
    real = bench.watch.capture
    monkeypatch.setattr(bench.watch, "capture", lambda calls: captured.append(len(calls)) or real(calls))
    shape, found = (32, 64, 32), {}
    layers = {PLAIN.name: (PLAIN, linear.Layer.of(shape, "cpu", 0))}
    linear.time_graphs(bench, shape, layers, found)
    assert captured == [4, 1]
    assert found[linear.GRAPH, PLAIN.name]["time after a pause"][0] > 0
