"""Times without a GPU: the same code on small shapes by the host's clock, what is wrong, and published values beside rows."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from ao_lab.measure.turns import HostWatch, Plan
from experiments.harness.measuring import Deadline, Wrong
from experiments.harness.rows import Journal, Row
from experiments.models.encoders import TINY, VIT_H, VIT_L
from experiments.report.content import readable
from experiments.sparsity import models, page, products, timed
from experiments.sparsity import page as products_page
from experiments.sparsity.products import BF16, FP8, Operands, operands
from experiments.sparsity.timed import DENSE, Table, TimedMethod
from tests.experiments.harness import tiny

ONCE = Plan(rounds=2, warmup=0, seconds=0.1, fewest=1, span=0.0, most_calls=1)
SHAPE = (16, 64, 32)


def test_methods_are_timed_in_turn_and_one_that_fails_says_why():
    def broken():
        raise Wrong("no")

    def pause(work):
        return lambda: torch.randn(work).sum()

    table = Table(
        "k", "d", "s",
        (
            TimedMethod(DENSE, lambda: pause(10)),
            TimedMethod("more", lambda: pause(10)),
            TimedMethod("broken", broken),
            TimedMethod("absent", broken, "missing: it"),
        ),
        ONCE, images=4,
    )  # fmt: skip
    found = timed.measure(HostWatch(), table, 0.0)
    assert found["broken"] == {"status: wrong: no": (0.0, "")}
    assert found["absent"] == {"status: missing: it": (0.0, "")}
    assert found[DENSE]["speed over dense"] == (1.0, "ratio")
    more = found["more"]
    assert more["images/s"][0] == pytest.approx(4e3 / more["time"][0])
    assert more["speed over dense"][0] == pytest.approx(found[DENSE]["time"][0] / more["time"][0])


def test_several_sets_are_rotated_and_operations_counted():
    asked = []
    several = [partial(asked.append, number) for number in range(2)]
    table = Table("k", "d", "s", (TimedMethod(DENSE, lambda: list(several)),), ONCE, operations=1e9)
    values = timed.measure(HostWatch(), table, 0.0)[DENSE]
    assert set(asked) == {0, 1}
    assert values["TFLOP/s"][0] == pytest.approx(1e9 / (values["time"][0] * 1e-3) / 1e12)


class Refusing(HostWatch):
    """A watch whose capture fails."""

    def capture(self, calls):
        raise RuntimeError("operation not permitted when stream is capturing")


def test_what_cannot_be_captured_is_launched_one_by_one_where_it_is_another_librarys():
    both = (
        TimedMethod(DENSE, lambda: lambda: None),
        TimedMethod("theirs", lambda: [lambda: None] * 2, foreign=True),
    )
    table = Table("k", "d", "s", both, ONCE, graph=True)
    found = timed.measure(Refusing(), table, 0.0)
    assert found[DENSE] == {
        "status: error: RuntimeError: operation not permitted when stream is capturing": (0.0, "")
    }
    assert found["theirs"][timed.ONE_BY_ONE] == (1.0, "")
    assert "time" in found["theirs"]
    assert "speed over dense" not in found["theirs"]


def test_what_a_foreign_library_refuses_is_not_asked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr(timed, "published_shapes", lambda settings: True)
    built = []

    def refused():
        built.append(1)
        raise Wrong("no")

    table = Table(
        "k",
        "d",
        "s",
        (TimedMethod(DENSE, lambda: lambda: None), TimedMethod("theirs", refused, foreign=True)),
        ONCE,
    )
    settings, journal = tiny.settings(tmp_path), Journal()
    for _ in range(2):
        timed.run_tables("t", [table], settings, journal, failed := [], Deadline(None))
    assert len(built) == 1
    assert failed == []


def test_nothing_is_measured_after_the_limit_or_without_a_gpu(tmp_path, monkeypatch):
    settings, failed = tiny.settings(tmp_path), []
    table = Table("linear", "d", "s", (TimedMethod(DENSE, lambda: pytest.fail("built")),), ONCE)
    timed.run_tables("t", [table], settings, Journal(), failed, Deadline(None))
    assert [row.metric for row in failed] == [f"status: {timed.NO_GPU}"]
    monkeypatch.setattr(timed, "published_shapes", lambda settings: True)
    timed.run_tables("t", [table], settings, Journal(), failed := [], Deadline(-1.0))
    assert [row.metric for row in failed] == ["status: not run: the -1 s of this run did not reach it"]


def test_a_step_of_a_sparse_layer_has_the_masked_weights_product():
    step = products.sparse(SHAPE, "cpu", 0, "dense", torch.float32, renew=True)
    dx, dw, db = step()
    assert [tuple(one.shape) for one in (dx, dw, db)] == [(16, 64), (32, 64), (32,)]
    # Straight through: the weight gradient is dense, that of the input is of the masked weight.
    _, plain, _ = products.linear_dense(SHAPE, "cpu", 0, torch.float32)()
    assert torch.equal(dw, plain)
    assert not torch.equal(dx, products.linear_dense(SHAPE, "cpu", 0, torch.float32)()[0])


def test_a_wrong_product_gets_no_time(monkeypatch):
    real = products.expected
    monkeypatch.setattr(products, "expected", lambda weight, x: -real(weight, x))
    with pytest.raises(Wrong, match=r"differs by 2\.0e"):
        products.sparse(SHAPE, "cpu", 0, "dense", torch.float32, renew=False)


def test_the_tables_have_the_published_shapes():
    assert [one.data for one in products.linear_tables("cpu", 0)] == [
        "13008x1024x4096",
        "13008x4096x1024",
    ] * 2
    own, others = models.training_tables("cpu", 0)
    assert (own.data, own.setting) == (VIT_L.name, models.training_setting())
    # cuSPARSELt would take all of the time that there is for the others.
    assert [[method.name for method in table.methods] for table in (own, others)] == [
        [DENSE, models.OWN],
        [DENSE, models.MLP],
    ]
    assert models.inference_tables("cpu", 0)[0].data == VIT_H.name


def test_layers_are_timed_as_graphs_first_and_cusparselt_last(monkeypatch):
    monkeypatch.setattr(products, "EAGER_PLAN", ONCE)
    monkeypatch.setattr(products, "GRAPH_PLAN", ONCE)
    made = products.linear_tables("cpu", 0, (SHAPE,), "dense", "dense")
    ours = [DENSE, products.LINEAR_OWN, products.OWN_KEPT, products.PRUNING]
    assert [(one.setting, one.graph) for one in made] == [(products.GRAPH, True), (products.EAGER, False)]
    assert [[method.name for method in one.methods] for one in made] == [
        ours,
        [*ours, products.SPARSE, products.KEPT],
    ]
    assert [method.name for one in made for method in one.methods if method.foreign] == [
        products.SPARSE,
        products.KEPT,
    ]
    for one in made:
        times = timed.measure(HostWatch(), one, 0.0)
        assert all("time" in times[method.name] for method in one.methods)
    renewed = []
    monkeypatch.setattr(products, "sparse", lambda *given, renew: renewed.append((given[3], renew)))
    for method in products.methods_of(SHAPE, "cpu", 0, "mine", ("theirs",))[1:]:
        if method.name != products.PRUNING:
            method.build()
    assert renewed == [("mine", True), ("mine", False), ("theirs", True), ("theirs", False)]


def test_published_layers_stand_beside_graphs_where_they_were_measured(monkeypatch):
    place, data = (products.LINEAR_OWN, "speed over dense"), "13008x1024x4096"
    rows = [
        row("linear", data, *place, 1.1, products.EAGER),
        row("linear", data, *place, 1.2, products.GRAPH),
    ]
    rows.append(row("linear", data, products.SPARSE, "speed over dense", 0.1, products.EAGER))
    (found,) = [one for one in page.comparisons(rows) if one.measured is not None]
    assert (found.measured, found.published) == (1.2, 1.24)
    assert found.measured_on == "a GPU, CUDA graph, own kernels"
    (found,) = [one for one in page.comparisons(rows[:1]) if one.measured is not None]
    assert (found.measured, found.measured_on) == (1.1, "a GPU, eager, own kernels")
    assert page.speed_findings(rows) == [
        f"Linear layers in training (a GPU, {readable(data)}), speed over dense: "
        f"{products.EAGER}: 2:4 (own kernels) 1.10, 2:4 0.10; {products.GRAPH}: 2:4 (own kernels) 1.20."
    ]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_encoders_run_at_a_small_size():
    made = partial(models.trained, TINY, 2, "cpu", 0, torch.float32, "aot_eager")
    before = counters["stats"]["unique_graphs"]
    assert made(products="dense")() is None
    # One for each of two lengths of attention: a limit of eight would leave the last of three methods without a compiler.
    assert counters["stats"]["unique_graphs"] - before == 2
    encode = partial(models.encoded, TINY, 2, "cpu", 0, torch.float32, "eager")
    dense = encode(convert=models.ENCODER_CONVERSIONS[DENSE])()
    int8 = encode(convert=models.ENCODER_CONVERSIONS[models.INT8])()
    # 8 bits change values by some percent.
    assert 0 < float((int8 - dense).norm() / dense.norm()) < 0.1


def test_generation_says_what_a_copy_cannot_store(monkeypatch):
    sparse = models.CONFIGS["int4 + 2:4"]
    monkeypatch.delattr(models.ao_lab, "SparseQuantizedTensor", raising=False)
    monkeypatch.setattr(models, "hasattr", lambda *_: False, raising=False)
    assert models.missing(sparse) == "missing: this copy stores 2:4 weights dense, with zeros"
    assert models.missing(models.CONFIGS["int4"]) is None


SMALL = (32, 64, 128)


@pytest.mark.parametrize("element", [BF16, FP8], ids=str)
def test_products_are_those_of_the_operands(element):
    """Each method's own check compares; cuSPARSELt and torchao's kernel need a GPU."""
    table = products.table_of("cpu", 0, SMALL, element)
    found = {method.name: method.build() for method in table.methods if method.name in (DENSE, products.OWN)}
    assert table.operations == 2 * 32 * 64 * 128
    assert [tuple(one().shape) for (one,) in found.values()] == [(32, 128)] * 2
    (one,) = operands(SMALL, element, "cpu", 0, sparse=True)
    assert int((one.weight.float() != 0).unflatten(-1, (-1, 4)).sum(-1).max()) == 2
    with pytest.raises(Wrong, match="differs by"):
        one.check(torch.zeros(32, 128, dtype=BF16))
    with pytest.raises(Wrong, match=r"in torch\.float32"):
        one.check(torch.zeros(32, 128))


def test_shapes_and_methods_of_the_bars():
    found = products.tables("cpu", 0)
    assert len(found) == 16
    first = [one for one in found if one.data == "128x4096x14336"]
    named = [[method.name for method in one.methods] for one in first]
    ours = [products.OWN, products.CUSPARSELT]
    assert named == [[DENSE, products.DENSE_FP8, *ours, products.CUTLASS], [DENSE, *ours]]
    assert {"8192x8192x8192", "16384x4096x14336", "2048x4096x14336"} <= {one.data for one in found}
    assert [one.data.split(", ")[1] for one in models.tables("cpu", 0)] == [
        f"{count} rows" for count in (1, 16, 4, 2, 8)
    ]


class Library:
    """cuSPARSELt's search: algorithm 1 is wrong, 2 refused, the rest are right."""

    def __init__(self):
        self.asked = set()

    def mm_search(self, *_):
        return 1, 1, 1, 3

    def mm(self, stored, x, transpose_result, alg_id, split_k, split_k_mode, out_dtype=None):
        assert transpose_result
        self.asked.add((alg_id, split_k, split_k_mode))
        if alg_id == 2:
            raise RuntimeError("operation not supported")
        return (x.t().float() @ stored.float().t() * (2 if alg_id == 1 else 1)).to(out_dtype or x.dtype)


@pytest.mark.parametrize("element", [BF16, FP8], ids=str)
def test_all_algorithms_are_looked_at_and_right_ones_taken(element, monkeypatch):
    library = Library()
    monkeypatch.setattr(torch, "_cslt_compress", lambda w: w)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", library.mm)
    monkeypatch.setattr(torch._C, "_cusparselt", library, raising=False)
    monkeypatch.setattr(products, "scaling", lambda: products._scaled)
    sets = operands(SMALL, element, "cpu", 0, sparse=True)
    (call,) = products.product(sets)
    sets[0].check(call())
    assert library.asked == {(0, 1, -1), (1, 1, -1), (2, 1, -1)}
    monkeypatch.setattr(Operands, "check", lambda self, y: (_ for _ in ()).throw(Wrong("no")))
    with pytest.raises(Wrong, match="none of 3 algorithms"):
        products.product(sets)


def test_blocks_multiply_by_their_weights(monkeypatch):
    shapes = ((64, 128), (128, 64))
    for name, convert in models.CONVERSIONS.items():
        if name != models.SPARSE_FP8:
            (call,) = models.calls(shapes, "cpu", 0, 3, convert)
            assert [tuple(one.shape) for one in call()] == [(3, 128), (3, 64)]
    tuned = []
    monkeypatch.setattr(
        models.ao_lab, "tune", lambda model, x, **options: tuned.append((x.shape[1], options))
    )
    models.calls(shapes, "cpu", 0, 3, models.CONVERSIONS[models.SPARSE_FP8])
    assert tuned == [(k, {"rows": (16,), "launches": "graph"}) for k in (64, 128)]
    layer = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: -(x @ self.weight.t()))
    with pytest.raises(Wrong, match=r"differs by 2\.0e"):
        models.check(layer, torch.randn(3, 64).bfloat16())


def test_the_llama_block_has_its_shapes():
    found = models.shapes_of(models.LLAMA_3_1_8B)
    assert found == ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))


def test_the_page_of_products(monkeypatch):
    times = {
        DENSE: 4.0,
        products.DENSE_FP8: 2.0,
        products.OWN: 1.0,
        products.CUTLASS: 1.5,
        products.CUSPARSELT: 1.2,
    }
    rows = [row("products", "1x2x3", name, "time", value) for name, value in times.items()]
    rows += [
        row("blocks", "block, 1 rows", name, "time", value)
        for name, value in (("int4", 2.0), ("int4 + 2:4", 1.0))
    ]
    assert products_page.product_findings(rows) == [
        "Matmuls with a 2:4 weight (a GPU; s), tokens x inputs x outputs, torch's dense fp8 by `torch._scaled_mm`, speed: "
        "4.00 over dense bfloat16, 2.00 over torch's dense fp8, 1.20 over libraries' 2:4 at 1 x 2 x 3.",
        "A block's layers in decoding (a GPU; s), speed: 2.00 int4 + 2:4 over int4 at block, 1 token.",
    ]
    first, second = products_page.product_sections(rows)
    assert first.tables[0].lines == [
        ["1x2x3", "4000.0", "2000.0", "1000.0", "1500.0", "1200.0", "4.000", "2.000", "1.200"]
    ]
    assert second.tables[0].columns == ["shape", "int4", "int4 + 2:4", "int4 + 2:4 over int4"]


def row(kind, data, method, metric, value, setting="s"):
    return Row(
        experiment="sparsity", table=f"{kind}/full/{data}", setting=setting, method=method, metric=metric, value=value, unit="",
        device="a GPU", seed=0,
    )  # fmt: skip


def test_published_values_stand_beside_the_same_shape(monkeypatch):
    rows = [
        row("linear", "13008x1024x4096", products.LINEAR_OWN, "speed over dense", 1.3, products.EAGER),
        row("vit", VIT_L.name, models.OWN, "time", 100.0, models.training_setting()),
        row("sam", VIT_H.name, DENSE, "images/s", 70.0),
    ]
    found = page.comparisons(rows)
    assert len(found) == len(page.values()) == 55
    beside = {(one.measured, one.published) for one in found if one.measured is not None}
    assert beside == {(1.3, 1.24), (100.0, 675.275311), (70.0, 22.75)}
    assert page.speed_findings(rows) == [
        "Linear layers in training (a GPU, 13008 x 1024 x 4096), speed over dense: 2:4 (own kernels) 1.30."
    ]
    assert {one.measured for one in page.comparisons([])} == {None}
    titles = [section.title.partition(" (")[0] for section in page.speed_sections(rows)]
    assert titles == [page.TITLES[kind] for kind in ("linear", "vit", "sam")]


def test_a_figure_is_of_what_its_gpu_measured_and_stands_once(monkeypatch):
    shown = []
    monkeypatch.setattr(page, "dots", lambda labels, series, *_, **__: shown.append(series))
    shapes = ("13008x1024x4096", "13008x4096x1024")
    rows = [
        row("linear", shape, products.LINEAR_OWN, "speed over dense", 1.3, products.EAGER) for shape in shapes
    ]
    rows += [replace(one, device="NVIDIA H200", value=1.5) for one in rows]
    names = [one.name for section in page.speed_sections(rows) for one in section.drawings]
    assert sorted(names) == ["sparsity-linear-ratios-full", "sparsity-linear-ratios-full-a-gpu"]
    for device, value in (("a GPU", 1.3), ("NVIDIA H200", 1.5)):
        values = [series[name] for series in shown for name in series if device in name]
        assert {one for found in values for one in found} - {None} == {value}


def test_a_pruned_model_is_compared_with_bfloat16_pruned_as_it_is(tmp_path):
    """Without half of their weights random layers are another model, which says nothing of a kernel."""
    bench = models.decode.Bench.of(tiny.settings(tmp_path))
    values = models.measure(bench, models.CONFIGS["int4 + 2:4"])
    change, _ = values["logits, change"]
    by_pruning = float((models.pruned_logits(bench) - bench.logits).norm() / bench.logits.norm())
    assert change < 0.3 < by_pruning
