"""Figures of tensors and models: what is drawn are the quantized values, the scales and the errors of the specification."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import ao_lab
import reference

plot = pytest.importorskip("ao_lab.plot", exc_type=ImportError)
pytest.importorskip("matplotlib")
from ao_lab.plot.tensors import scales_of, stored  # noqa: E402
from ao_lab.plot.tradeoff import APART, frontier, side_by_side  # noqa: E402

X = np.random.default_rng(7).standard_normal((128, 512)).astype(np.float32)


def boxes_of(axis):
    """What names cover, without the lines that lead to their points."""
    for one in axis.texts:
        one.arrowprops = one.arrow_patch = None
    return [one.get_window_extent() for one in axis.texts]


def bars(axis):
    (lines,) = [one for one in axis.collections if one.get_segments()]
    return {float(segment[0][0]): float(segment[1][1]) for segment in lines.get_segments()}


@pytest.mark.parametrize("scheme", ["mxfp4", "int4_g32_asymmetric", "fp8_128x128"])
def test_bars_are_shares_of_quantized_values(scheme):
    found = bars(plot.tensor(X, scheme).axes[0])
    q = reference.quantize(X, scheme)
    fmt = reference.FORMATS[q.scheme.element]
    codes = reference.unpack(q.codes, fmt, q.shape) if q.packed else q.codes
    values, counts = np.unique(fmt.values[codes] + 0.0, return_counts=True)
    assert found == pytest.approx(dict(zip(values.tolist(), (100 * counts / X.size).tolist(), strict=True)))
    assert sum(found.values()) == pytest.approx(100)


def test_scales_are_those_that_multiply():
    """Of powers of two and float32 they are the stored ones, whatever the zero point; two levels are multiplied."""
    q = reference.quantize(X, "mxfp4")
    assert np.array_equal(
        scales_of(q), reference.decode(q.scale, "float8_e8m0fnu").astype(np.float64).ravel()
    )
    q = reference.quantize(X, "int4_g32_asymmetric")
    assert scales_of(q) == pytest.approx(q.scale.ravel(), rel=2**-22)
    q = reference.quantize(X, "nvfp4")
    wanted = reference.decode(q.scale, "float8_e4m3fn").astype(np.float64).ravel() * float(q.outer)
    assert scales_of(q) == pytest.approx(wanted, rel=2**-22)


@pytest.mark.parametrize(
    ("scheme", "count"), [("int8_tensorwise", 1), ("int8_rowwise", 128), ("fp8_128x128", 4), ("nf4", 1024)]
)
def test_each_block_counts_once(scheme, count):
    assert len(scales_of(reference.quantize(X, scheme))) == count


def test_stored_tensors_are_drawn_as_they_are():
    model = ao_lab.quantize_(nn.Sequential(nn.Linear(64, 32)), ao_lab.SchemeConfig(scheme="int4_g32"))
    assert model.changed
    layer = nn.Sequential(nn.Linear(64, 32))
    ao_lab.quantize_(layer, ao_lab.SchemeConfig(scheme="int4_g32"))
    weight = layer[0].weight
    direct = stored(weight, reference.SCHEMES["int4_g32"], -1)
    assert np.array_equal(np.asarray(direct.codes), weight.quantized.codes.numpy())
    assert "int4_g32" in plot.tensor(weight, "int4_g32").axes[0].get_title(loc="left")
    with pytest.raises(ValueError, match="is stored in int4_g32, and mxfp4 was asked for"):
        plot.tensor(weight, "mxfp4")


#: With NaN and infinity.
NAN = np.where(np.arange(X.size).reshape(X.shape) < 2, np.float32([np.nan, np.inf] * (X.shape[-1] // 2)), X)


def test_a_tensor_without_errors_is_drawn_and_saved(tmp_path):
    assert plot.save(plot.schemes(np.zeros((2, 64), np.float32), ["mxfp4"]), tmp_path / "x.svg").is_file()


def test_errors_are_relative_rms_over_all_tensors():
    a, b = X[:32], 3 * X[32:64]
    (found,) = plot.scheme_errors({"a": a, "b": torch.tensor(b)}, ["mxfp4"])
    back = {name: reference.dequantize(reference.quantize(x, "mxfp4")) for name, x in (("a", a), ("b", b))}
    errors = [float(np.square((back[name] - x).astype(np.float64)).sum()) for name, x in (("a", a), ("b", b))]
    sizes = [float(np.square(x.astype(np.float64)).sum()) for x in (a, b)]
    assert found.total == pytest.approx((sum(errors) / sum(sizes)) ** 0.5)
    assert found.tensors["b"] == pytest.approx((errors[1] / sizes[1]) ** 0.5)
    assert found.bits == 4.25


def test_models_are_drawn_by_their_linear_layers():
    model = nn.Sequential(nn.Embedding(10, 64), nn.Linear(64, 33), nn.Linear(33, 10))
    (found,) = plot.scheme_errors(model, ["int4_g32"])
    assert list(found.tensors) == ["1.weight"]
    assert found.refused == ("2.weight",)  # 33 inputs are no groups of 32
    figure = plot.schemes(model, ["int8_rowwise", "int4_g32"])
    labels = [one.get_text() for one in figure.axes[0].get_yticklabels()]
    assert labels[0].startswith("int8_rowwise")
    assert labels[1].endswith("1 of 2")
    again = plot.schemes(model, plot.scheme_errors(model, ["int4_g32"]))
    assert again.axes[0].get_yticklabels()[0].get_text() == labels[1]


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: plot.tensor(X[:0], "mxfp4"), "no element to draw"),
        (lambda: plot.schemes(X, []), "one scheme or more"),
        (lambda: plot.schemes(X, ["mxfp"]), "unknown scheme 'mxfp'"),
        (lambda: plot.schemes(X[:, :5], ["mxfp4"]), "mxfp4 takes none of the tensors; tensor: shape"),
        (lambda: plot.schemes(nn.ReLU()), "no weight of a linear layer"),
        (lambda: plot.schemes("no/such/folder"), "is no folder of a model"),
        (lambda: plot.tradeoff([]), "one point or more"),
        (lambda: plot.schemes({"a": X, "b": NAN}, ["mxfp4"]), r"NaN or infinity in b \(2 of them\); leave"),
        (lambda: plot.scheme_errors(torch.tensor(NAN), ["mxfp4"]), r"NaN or infinity in tensor"),
    ],
)
def test_wrong_inputs(draw, said):
    with pytest.raises(ValueError, match=said):
        draw()


def test_what_nothing_beats_is_joined():
    points = [
        ("a", 1, 3.0),
        ("b", 2, 2.0),
        ("c", 3, 2.5),
        ("d", 4, 1.0),
        ("e", 2.5, float("nan")),
        ("f", 4, 0.9),
    ]
    figure = plot.tradeoff([plot.Point(*one) for one in points], scale=1)
    steps = figure.axes[0].get_lines()[0]
    assert steps.get_xdata().tolist() == [1, 2, 4]
    assert steps.get_ydata().tolist() == [3.0, 2.0, 0.9]
    assert sorted(one.get_text() for one in figure.axes[0].texts) == ["a", "b", "c", "d", "f"]
    assert "not finite: e" in figure.axes[0].get_title(loc="left")


def test_names_of_neighbours_do_not_cover_each_other():
    points = [plot.Point(f"configuration {n}", 1 + 0.01 * n, 2 + 0.001 * n) for n in range(4)] + [
        plot.Point("far", 9, 9)
    ]
    figure = plot.tradeoff(points, scale=1)
    figure.canvas.draw()
    boxes = boxes_of(figure.axes[0])
    assert not any(a.overlaps(b) for n, a in enumerate(boxes) for b in boxes[:n])


def test_a_legend_says_what_colours_and_bars_are():
    points = [
        plot.Point("a", 1, 2.0, 0.1),
        plot.Point("b", 2, 2.5),
        plot.Point("base", 9, 1.0, reference=True),
    ]
    for given, said in ((points, 4), (points[:1], 2), (points[1:2], 1)):
        legend = plot.tradeoff(given, scale=1).axes[0].get_legend()
        assert len(legend.get_texts()) == said
    assert legend.get_texts()[0].get_text().startswith("no other is as good")


def test_better_is_paired_where_windows_are_known_and_the_loss_alone_elsewhere():
    """Each interval is around the difference from a third: a wide one of a smaller configuration is no merit of it."""
    small, large = (
        (1.0, 2.0, 3.0, 4.0),
        (0.9, 1.89, 2.91, 3.9),
    )  # apart by 0.1 in each window, which differ by 1
    alone = [plot.Point("small", 1, 2.5, 2.0), plot.Point("large", 2, 2.4, 2.0)]
    paired = [replace(one, losses=losses) for one, losses in zip(alone, (small, large), strict=True)]
    noisy = [paired[0], replace(paired[1], losses=(0.0, 3.0, 2.0, 4.6))]
    cases = (
        (alone, ["small", "large"], "alone"),
        (paired, ["small", "large"], "paired"),
        (noisy, ["small"], "paired"),
    )
    for points, best, said in cases:
        assert [one.name for one in frontier(points)] == best
        assert said in plot.tradeoff(points).axes[0].get_legend().get_title().get_text()


def test_bars_of_about_the_same_size_stand_side_by_side():
    """And others where their costs are."""
    points = [plot.Point("a", 50, 2.0, 0.1), plot.Point("b", 50.01, 2.01, 0.1), plot.Point("c", 51, 2.0, 0.1)]
    points.append(plot.Point("base", 150, 1.9, reference=True))
    at = side_by_side(points)
    assert [at[one] for one in points[2:]] == [51, 150]
    assert at[points[1]] - at[points[0]] == pytest.approx(APART * 100)
    assert at[points[0]] < 50.005 < at[points[1]]
    assert side_by_side(points[:1]) == {points[0]: 50}


def test_a_name_lies_on_no_other_point_once_the_figure_is_laid_out():
    points = [plot.Point("a configuration", 1 + 0.02 * n, 2 + 0.03 * (n % 3), 0.01) for n in range(6)]
    points.append(plot.Point("far", 9, 9))
    figure = plot.tradeoff(points, scale=1)
    figure.canvas.draw()
    (axis,) = figure.axes
    drawn = [one.lines[0].get_xydata()[0] for one in axis.containers[: len(points)]]
    spots = [axis.transData.transform(one) for one in drawn]
    boxes = boxes_of(axis)
    assert not any(box.contains(*spot) for box in boxes for spot in spots)
