"""Figures of formats and schemes: what they draw is what the records say, legible on light and dark pages."""

import numpy as np
import pytest

import reference

plot = pytest.importorskip("ao_lab.plot", exc_type=ImportError)
pytest.importorskip("matplotlib")
formats = pytest.importorskip("ao_lab.plot.number_lines")


def marks(figure, number=0):
    """Places of the marks of a format's line."""
    lines = [one for one in figure.axes[0].collections if len(one.get_segments()) > 1]
    return np.array([segment[0][0] for segment in lines[number].get_segments()])


def test_values_are_all_finite_ones_of_the_record():
    figure = plot.formats("float4_e2m1fn")  # `values` by the name of what it draws
    assert marks(figure).tolist() == sorted({*reference.FORMATS["float4_e2m1fn"].values.tolist()})
    assert {float(one.get_text()) for one in figure.axes[0].texts} == set(marks(figure).tolist())
    assert "(before any scale)" in figure.axes[0].get_xlabel()


def test_labels_of_dense_values_do_not_cover_each_other():
    """Those that have room on neither side are left out; formats whose values lie apart have all, above and below in turn."""
    dense = np.array([-1.0, -0.0625, 0.0, 0.015625, 0.03, 0.0625, 1.0])
    kept = [*formats.labelled(dense, dense, False)]
    assert [value for _, value, _ in kept] == [-1.0, -0.0625, 0.0, 0.0625, 1.0]
    for above in (True, False):
        places = [place for place, _, side in kept if side == above]
        assert np.diff(places).min() >= formats.APART * 2
    even = np.arange(-8.0, 8.0)
    assert [(value, above) for _, value, above in formats.labelled(even, even, False)] == [
        (value, number % 2 == 0) for number, value in enumerate(even)
    ]


def test_several_formats_are_parts_of_their_largest():
    figure = plot.values("int4", "float8_e5m2")
    assert marks(figure)[0] == -1
    assert marks(figure)[-1] == 7 / 8
    assert marks(figure, 1)[-1] == 1
    assert [one.get_text().split("\n")[0] for one in figure.axes[0].get_yticklabels()] == [
        "int4",
        "float8_e5m2",
    ]


def test_a_logarithmic_line_has_positive_values():
    figure = plot.values("int4", log=True)
    assert marks(figure).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert figure.axes[0].get_xscale() == "log"


def curve(figure, label):
    (line,) = [one for one in figure.axes[0].get_lines() if one.get_label() == label]
    return np.asarray(line.get_xdata()), np.asarray(line.get_ydata())


def test_error_of_floats_stays_and_of_integers_grows_as_numbers_get_small():
    figure = plot.error("float8_e4m3fn", "int8_rowwise", octaves=12)
    x, floats = curve(figure, "float8_e4m3fn")
    _, integers = curve(figure, "int8_rowwise")
    # Normal numbers of a format with m mantissa bits lie within 2**-(m + 1) of what is stored.
    assert floats[x > 2**-12].max() <= 2**-4
    assert integers[-1] < floats[-1] / 5
    # Below half a step of 127 to amax everything is 0.
    assert np.all(integers[x < 0.45 / 127] == 1)


@pytest.mark.parametrize(
    "scheme",
    ["mxfp4", "nvfp4", "nf4", "torchao.nf4", "fp8_128x128", "fp8_tensorwise", "int4_g256_asymmetric"],
)
def test_blocks_of_every_kind_are_measured(scheme):
    _, found = curve(plot.error(scheme, octaves=4), scheme)
    assert np.all((found > 0) & (found <= 1))


def test_errors_above_1_are_inside_the_axes():
    """Elements of stretched formats, which have no 0, are farther from 0 than they are large."""
    figure = plot.error("stretched2", octaves=4)
    assert 2 < curve(figure, "stretched2")[1].max() < figure.axes[0].get_ylim()[1]


def test_axes_of_the_caller_and_themes():
    from matplotlib.figure import Figure

    mine = Figure(facecolor="black")
    axis = mine.subplots()
    axis.set_facecolor("black")
    assert plot.values("int2", ax=axis) is mine
    dark = plot.values("int2", theme="dark")
    assert axis.collections[1].get_color().tolist() == dark.axes[0].collections[1].get_color().tolist()
    light = plot.values("int2")
    assert light.get_facecolor() != dark.get_facecolor()


def test_files_hold_text_and_say_what_they_show(tmp_path):
    path = plot.save(plot.values("int4"), tmp_path / "values.svg", "The sixteen values of int4.")
    text = path.read_text()
    assert ">values of" in text.lower()
    assert "The sixteen values of int4." in text
    again = plot.save(plot.values("int4"), tmp_path / "again.svg", "The sixteen values of int4.").read_text()
    assert text == again


def test_a_figure_that_fails_leaves_the_earlier_file(tmp_path, monkeypatch):
    path = plot.save(plot.values("int2"), tmp_path / "values.svg")
    before, broken = path.read_text(), plot.values("int4")

    def savefig(to, **_):
        to.write_text("<svg")
        raise RuntimeError("a font is missing")

    monkeypatch.setattr(broken, "savefig", savefig)
    with pytest.raises(RuntimeError):
        plot.save(broken, path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: plot.values(), "one format or more"),
        (lambda: plot.values("bfloat16"), "65536 values"),
        (lambda: plot.values("float4"), "the nearest are float4_e2m1fn"),
        (lambda: plot.values("int4", theme="blue"), "theme is one of light, dark"),
        (lambda: plot.values("int4", ax=[]), "takes 1 axes here, got 0"),
        (lambda: plot.error("mxfp"), "unknown format or scheme 'mxfp'"),
        (lambda: plot.error("mxfp4", octaves=0), "octaves is a number from 1 to 60"),
        (lambda: plot.save(plot.values("int4"), "figure.jpg"), "ends in .svg, .png, .pdf"),
    ],
)  # fmt: skip
def test_wrong_inputs(draw, said):
    with pytest.raises(ValueError, match=said):
        draw()
