"""What `explain` says of ranges of rows: families of kernels for weights of each kind, on a GPU that CPU tensors pass for."""

import platform

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab import SparsityConfig, explain, quantize_, sparsify_
from ao_lab.gemm import choices, codes, dense, select, sparse
from ao_lab.gemm.choices import Candidate, Choice
from ao_lab.gemm.dense import is_host
from ao_lab.quantization import report
from ao_lab.tuning import candidates
from fast.gemm import families as records
from fast.gemm.choose import codes_of_layer
from fast.gemm.families import SM90_S8_GEMM, SM90_W4A16_GEMM, SM90_W4A16_GEMV, TRITON_SMALL_M
from fast.launch import cuda
from tests.ao_lab.gemm.capability import set_capability

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="triton has no packages for this system")
BF16 = torch.bfloat16


@pytest.fixture
def gpu(monkeypatch):
    """A Hopper GPU."""
    set_capability(monkeypatch, (9, 0))
    monkeypatch.setattr(ao_lab.QuantizedTensor, "is_cuda", True)
    monkeypatch.setattr(sparse, "missing_compiler", lambda: None)
    for module in (select, codes):
        monkeypatch.setattr(module, "is_host", lambda device: False)
    monkeypatch.setattr(records, "device_of", lambda device: records.HOPPER)


def layer(config, layout="", shape=(256, 384)):
    """A model of one layer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(*shape)).to(BF16).requires_grad_(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ao_lab.QuantizedTensor, "is_cuda", False)
        if config.sparsity:
            sparsify_(net, SparsityConfig())
        quantize_(net, config)
        if layout:
            net[0].weight = nn.Parameter(net[0].weight.to_layout(layout), requires_grad=False)
    return net


def families(net):
    """The ranges of a layer, as a report has them."""
    report = explain(net)
    told = ", ".join(map(str, report.changed[0].families))
    assert f"\n    {told}" in str(report)
    return told


@pytest.mark.parametrize(
    ("config", "layout", "told"),
    [
        (
            ao_lab.Int4WeightOnlyConfig(), "preshuffled",
            "1-4 tokens sm90_w4a16_gemv, 5-64 tokens triton_small_m, 65 tokens and more sm90_w4a16_gemm",
        ),
        (
            ao_lab.Int4WeightOnlyConfig(), "",
            "1 token triton_gemv_w4a16, 2-32 tokens triton_gemm_small_m, 33 tokens and more torch_dequantize",
        ),
        (
            ao_lab.Int8DynamicActivationInt8WeightConfig(), "",
            "1 token triton_gemv_w8a8, 2-2944 tokens triton_int_scaled_mm, 2945 tokens and more sm90_s8_gemm",
        ),
        (
            ao_lab.Float8DynamicActivationFloat8WeightConfig(), "",
            "1 token triton_gemv_w8a8, 2 tokens and more torch_scaled_mm",
        ),
        (ao_lab.Int4WeightOnlyConfig(kernel="dequantize"), "", "torch_dequantize"),
        (
            ao_lab.Int4WeightOnlyConfig(group_size=32, sparsity="2:4"), "",
            "1-64 tokens sm90_sparse24_w4a16_gemv, 65 tokens and more torch_dequantize",
        ),
        (ao_lab.Int8DynamicActivationInt8WeightConfig(sparsity="2:4"), "", "sm90_sparse24_gemm"),
        (ao_lab.Int8WeightOnlyConfig(sparsity="2:4"), "", "torch_dequantize"),
        (ao_lab.Int4WeightOnlyConfig(kernel="reference"), "", "reference"),
    ],
    ids=str,
)  # fmt: skip
def test_ranges(gpu, config, layout, told):
    assert families(layer(config, layout)) == told


def test_weights_of_one_form_are_asked_about_once(gpu, monkeypatch):
    """In a report; the next one asks again, as kernels load in between."""
    config, asked, find = ao_lab.Int4WeightOnlyConfig(), [], report.families_by_rows
    nets = [layer(config, "preshuffled", shape) for shape in ((256, 384), (256, 384), (384, 256))]
    nets += [layer(config, "", (256, 384)), layer(ao_lab.Int8WeightOnlyConfig(), "preshuffled", (256, 384))]
    monkeypatch.setattr(report, "families_by_rows", lambda *a: asked.append(a) or find(*a))
    alone = [families(net) for net in nets]
    assert len(asked) == 5
    told = explain(nn.Sequential(*(net[0] for net in nets))).changed
    assert [", ".join(map(str, one.families)) for one in told] == alone
    assert len(asked) == 5 + 4
    assert len(set(alone)) > 2


@pytest.fixture
def table():
    """What was tuned on a CPU's device: nothing, before and after."""
    found = choices.choices_for(torch.device("cpu"))
    found.clear()
    yield found
    found.clear()


def test_what_was_tuned_goes_first(gpu, monkeypatch, table):
    """A family that `tune` measured to be the quickest: told, and asked first by the product; what has no families has none."""
    net = layer(ao_lab.Int4WeightOnlyConfig(), "preshuffled")
    w, asked = net[0].weight.t(), []
    monkeypatch.setattr(dense, "linear_small", lambda x, stored, bias, first: asked.append(first) or x)
    for rows, name in ((4, "triton_small_m"), (16, "sm90_w4a16_gemv")):
        of = choices.problem_of("inference", *select.inference_keys(w), (rows, 384, 256), BF16)
        table.add(Choice(of, name, (Candidate(name),)))
    assert families(net).startswith(
        "1-4 tokens triton_small_m, 5-16 tokens sm90_w4a16_gemv, 17-64 tokens triton_small_m, 65"
    )
    select.product(torch.zeros(4, 256, dtype=BF16), w)
    select.select_product(w, BF16)(torch.zeros(16, 256, dtype=BF16), w, None)
    assert asked == ["triton_small_m", "sm90_w4a16_gemv"]


def test_candidates_of_tune_are_families(gpu):
    """Of a weight that several multiply, the default first, and of no other; those that do not take the rows say why."""
    w = layer(ao_lab.Int4WeightOnlyConfig(), "preshuffled")[0].weight.t()
    for rows, order in (
        (1, [SM90_W4A16_GEMV, TRITON_SMALL_M, SM90_W4A16_GEMM]),
        (64, [TRITON_SMALL_M, SM90_W4A16_GEMM, SM90_W4A16_GEMV]),
        (300, [SM90_W4A16_GEMM, SM90_W4A16_GEMV, TRITON_SMALL_M]),
    ):
        listed = select.candidates(w, BF16, rows)
        assert [name for name, one in listed.items() if one.family] == [one.name for one in order]
        assert set(listed) == {*select.PRODUCTS, *(one.name for one in order)} - {"fused"}
    plain = layer(ao_lab.Int4WeightOnlyConfig())[0].weight.t()
    assert list(select.candidates(plain, BF16, 1)) == list(select.PRODUCTS)
    x = torch.zeros(64, 256, dtype=BF16)
    reason = candidates._serving_reason(select.Selected("fused", SM90_W4A16_GEMV.name), w, x)
    assert reason == "there are 1 to 16 tokens, got 64"
    assert candidates._most_rows(select.Selected("fused", SM90_W4A16_GEMV.name), w, x) == 16
    assert candidates._most_rows(select.Selected("fused", TRITON_SMALL_M.name), w, x) is None


@pytest.mark.parametrize(
    ("shape", "few"), [((576, 1000), 64), ((512, 1000), 64), ((576, 1024), 64), ((1152, 4300), 128)], ids=str
)
def test_ranges_of_lengths_that_are_filled(gpu, shape, few):
    """Kernels in CUDA C++ take whole tiles alone; small weights are dense for more than half a tile of 128 rows."""
    told = families(layer(ao_lab.Int4WeightOnlyConfig(group_size=32), "preshuffled", shape))
    assert told == f"1-{few} tokens triton_small_m, {few + 1} tokens and more torch_dequantize"


@pytest.mark.parametrize(
    ("config", "layout", "family", "rows", "told"),
    [
        (
            ao_lab.Int4WeightOnlyConfig(), "preshuffled", SM90_W4A16_GEMV, 1,
            "1-4 tokens triton_small_m (for sm90_w4a16_gemv, which did not load), 5-64 tokens triton_small_m, 65 tokens",
        ),
        (
            ao_lab.Int4WeightOnlyConfig(), "preshuffled", SM90_W4A16_GEMM, 65,
            "5-64 tokens triton_small_m, 65-128 tokens triton_small_m (for sm90_w4a16_gemm, which did not load), "
            "129 tokens and more torch_dequantize (for sm90_w4a16_gemm, which did not load)",
        ),
        (
            ao_lab.Int8DynamicActivationInt8WeightConfig(), "", SM90_S8_GEMM, 4096,
            "2945 tokens and more triton_int_scaled_mm (for sm90_s8_gemm, which did not load)",
        ),
    ],
    ids=["a variant", "a kernel", "codes"],
)  # fmt: skip
def test_what_did_not_load_is_told(gpu, monkeypatch, config, layout, family, rows, told):
    """What multiplies for it, of which rows, and why; what was not tried is taken to load."""
    net = layer(config, layout)
    before, w = families(net), net[0].weight.t()

    def refuse(*given):
        raise RuntimeError("no kernel image\nof many lines")

    monkeypatch.setattr(cuda, "FAILURES", {})
    monkeypatch.setattr(cuda, "loaded", refuse)
    asked = select._by_weight if layout else select._by_codes
    chosen = family.chosen(asked(w, BF16, rows)[1])
    cuda.is_loadable.cache_clear()
    with pytest.warns(UserWarning, match="no kernel image"):
        assert not cuda.is_loadable(chosen.kernel, chosen.variant, chosen.problem, w.codes.get_device())
    cuda.is_loadable.cache_clear()
    assert told not in before
    assert told in families(net)
    assert f"\n    {family.name} did not load: no kernel image" in str(explain(net))
    assert "of many lines" not in str(explain(net))


@pytest.mark.parametrize(
    "config", [ao_lab.Int8DynamicActivationInt8WeightConfig(), ao_lab.Float8DynamicActivationFloat8WeightConfig(),
               ao_lab.Float8DynamicActivationFloat8WeightConfig(granularity=ao_lab.PerRow())], ids=str,
)  # fmt: skip
def test_what_is_told_of_codes_is_what_is_done(gpu, config):
    """A product asks `multiplies_codes`, `explain` asks `choose`: one rule, told and done."""
    net = nn.Sequential(nn.Linear(1024, 1024)).to(BF16).requires_grad_(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ao_lab.QuantizedTensor, "is_cuda", False)
        quantize_(net, config)
    w = net[0].weight.t()
    scheme = codes.activation(w)
    for rows in (1, 2, 16, 17, 24, 33, 64, 65, 128, 300):
        x = torch.empty((rows, 1024), dtype=BF16, device="meta")
        p = records.of_codes(scheme, w.scheme, (1024, 1024), rows, BF16, w.device)
        ours = not codes_of_layer(scheme, w.scheme, p).name.startswith("torch")
        assert codes.multiplies_codes(x, w) == ours, rows


def test_none_on_a_cpu():
    net = nn.Sequential(nn.Linear(256, 384)).to(BF16).requires_grad_(False)
    quantize_(net, ao_lab.Int4WeightOnlyConfig())
    assert is_host(net[0].weight.device)
    assert explain(net).changed[0].families == ()
