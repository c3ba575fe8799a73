"""Times of plain weights stand by tokens, beside those of layers where both have the scheme."""

from experiments.harness.rows import Row
from experiments.kernels import layers
from experiments.linear.run import SPEED, TIME

GPU = "NVIDIA H200"
DENSE = "time over dense"


def row(experiment, table, setting, method, metric, value, kernel):
    unit = "us" if metric == TIME else "ratio"
    place = {"experiment": experiment, "table": table, "setting": setting, "method": method}
    return Row(**place, metric=metric, value=value, unit=unit, device=GPU, seed=0, kernel=kernel)


def plain(case, time, over):
    kernel, table = "" if "rows" in case else "gemv_w4a16_kernel", "kernels/full/random-normal"
    values = {TIME: time, DENSE: over}
    return [row("kernels", table, layers.WEIGHT, case, name, value, kernel) for name, value in values.items()]


def layer(tokens, method, time, speed, family):
    setting, table = layers.setting_of(tokens), f"weights/full/{layers.WEIGHT}"
    values = {TIME: time, SPEED: speed}
    kernel = f"fused: {family}"
    return [row("linear", table, setting, method, name, value, kernel) for name, value in values.items()]


ROWS = [*plain("linear.int4_g128.rows16", 32.0, 1.25), *plain("linear.int4_g128", 10.0, 0.5)]
LAYERS = [
    *layer(1, "int4 g128", 11.0, 2.5, "sm90_w4a16_gemv"),
    *layer(16, "int4 g128", 13.0, 2.0, "triton_small_m"),
    *layer(16, "int8", 13.0, 2.0, "triton_small_m"),
]


def test_times_of_plain_weights_stand_by_tokens_and_name_their_layout():
    lines = next(iter(layers.results_of(ROWS).values()))
    one, several, where = layers.sentences(lines)
    assert one.startswith("1 token by a 14336 x 4096 weight in the plain layout")
    assert one.endswith("int4_g128 10.0 us (2.00x).")
    assert several.startswith("16 tokens")
    assert several.endswith("int4_g128 32.0 us (0.80x).")
    assert "[linear](linear.md)" in where
    assert layers.sentences([]) == []


def test_a_layer_stands_beside_the_plain_weight_of_its_scheme():
    (section,) = layers.joined(ROWS, {"linear": LAYERS}.__getitem__)
    assert section.tables[0].lines == [
        ["int4_g128", "1", "10.0", "2.00", "11.0", "2.50", "sm90_w4a16_gemv"],
        ["int4_g128", "16", "32.0", "0.80", "13.0", "2.00", "triton_small_m"],
    ]
    assert layers.joined(ROWS, lambda name: []) == []


def test_layers_are_found_by_scheme():
    assert layers.layer_of("int4_g128") == "int4 g128"
    assert layers.layer_of("mxfp4") == "mxfp4"
    assert layers.layer_of("int4_g64_asymmetric_bf16") == ""
