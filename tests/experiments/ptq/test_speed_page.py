"""Speed against loss: rows of two experiments, joined by schemes, each axis with its model and device."""

import pytest

from experiments.harness.rows import Row
from experiments.linear.tables import setting_of
from experiments.ptq import page, speed_page
from experiments.report import fronts, plots
from experiments.report.plots import Point


def loss(scheme, value, setting="weights"):
    """Rows of a scheme on a real model."""
    made = {"loss, change": value, "loss, standard error of the change": 0.01, "windows": 4.0}
    return [
        Row(
            experiment="ptq",
            table="real a-model/quick/a-text",
            setting=setting,
            method=scheme,
            metric=metric,
            value=one,
            unit="nat",
            device="cpu",
            seed=0,
        )
        for metric, one in made.items()
    ]


def timed(method, value, part="weights", device="NVIDIA H200", kernel="", shape=speed_page.SHAPE):
    """Rows of the time of a layer at both numbers of tokens."""
    return [
        Row(
            experiment="linear",
            table=f"{part}/full/{shape}",
            setting=setting_of(tokens),
            method=method,
            metric="time",
            value=value * tokens,
            unit="us",
            device=device,
            seed=0,
            kernel=kernel,
        )
        for tokens in speed_page.TOKENS
    ]


LOSSES = [
    *loss("int8_rowwise", 0.02), *loss("int4_g32", 0.3), *loss("nf4", 0.2), *loss("bfloat16", 0.0),
    *loss("int8_rowwise", 0.05, "weights + activations in int8_rowwise"),
]  # fmt: skip
TIMES = [
    *timed("bfloat16", 30.0), *timed("int8", 15.0), *timed("int4 g32", 12.0), *timed("int6 g32", 13.0),
    *timed("int8 dynamic", 17.0, "activations"), *timed("int8", 3.0, shape="1024x4096"),
    *timed("int8", 99.0, device="cpu"),
]  # fmt: skip


def joined(losses=LOSSES, times=TIMES):
    return page.joined(losses, {"linear": times}.__getitem__)


def test_loss_and_time_are_joined_by_the_schemes_of_weights_and_inputs():
    (section,) = joined()
    (table,) = section.tables
    found = {line[0]: (line[2], *line[3].split(" ")[:1], line[4], line[6]) for line in table.lines}
    assert found == {
        "int4 g32": ("", "0.300", "12.00", "192.00"), "int8": ("", "(0.020", "15.00", "240.00"), "nf4": ("", "0.200", "", ""),
        "int8 dynamic": ("int8_rowwise", "0.050", "17.00", "272.00"),
    }  # fmt: skip
    absent = " ".join(one for one in section.paragraphs if one.startswith("**"))
    assert "int6 g32" in absent
    assert absent.endswith("not timed at 1 token and 16 tokens with the kernel that is chosen today.** nf4.")
    late = setting_of(speed_page.TOKENS[1])
    (section,) = joined(times=[one for one in TIMES if (one.method, one.setting) != ("int8", late)])
    told = [one for one in section.paragraphs if "not timed" in one]
    assert [one.partition("not timed at ")[2].partition(" with")[0] for one in told] == [
        "1 token",
        "16 tokens",
    ]
    assert told[1].endswith("int8; nf4.")


def test_each_axis_says_of_which_model_and_device_it_is():
    (section,) = joined()
    (drawing,) = section.drawings
    for figure in (drawing.figure, drawing.narrow):
        assert [axis.get_xlabel() for axis in figure.axes] == ["time of one layer, NVIDIA H200 (us)"] * 2
        assert [axis.get_ylabel() for axis in figure.axes] == ["increase of the loss (nats),\na-model"] * 2
    assert "a-model on a-text (short run, CPU)" in drawing.caption
    assert "one layer of 14336 x 4096 (NVIDIA H200)" in drawing.caption
    assert plots.svg(drawing.figure).count("int8 dynamic: 0.05 at ") == 2


@pytest.mark.parametrize(
    "rows",
    [
        {"times": []},
        {"losses": []},
        {"times": timed("int8", 1.0, device="cpu")},
        {"times": timed("int6 g32", 1.0)},
    ],
)
def test_without_either_there_is_no_section(rows):
    assert joined(**rows) == []


def test_what_ran_by_another_kernel_than_todays_has_no_point():
    """Today's is chosen with Triton, in whose absence nothing is said of any row."""
    pytest.importorskip("triton")
    old = [one for one in TIMES if one.method != "int8"] + timed("int8", 15.0, kernel="dequantize")
    (section,) = joined(times=old)
    assert {line[0]: line[4] for line in section.tables[0].lines}["int8"] == ""


def test_panels_of_a_phone_stand_below_each_other():
    """Half as wide as on a screen, the legend over both in as many lines as it needs."""
    panels = {
        name: fronts.Panel([Point(1.0, 0.02, "MX", "a"), Point(2.0, 0.5, "FP8")], {}, {}) for name in "ab"
    }
    wide = fronts.front_panels(panels, "x", "y", plots.COLORS, symlog=0.01)
    narrow = fronts.front_panels(panels, "x", "y", plots.COLORS, columns=1, width=fronts.NARROW)
    assert (wide.axes[0].get_yscale(), narrow.axes[0].get_yscale()) == ("symlog", "linear")
    tops = [[axis.get_position().y1 for axis in figure.axes] for figure in (wide, narrow)]
    assert tops[0][0] == tops[0][1]
    assert tops[1][0] > tops[1][1]
    assert narrow.get_figwidth() == fronts.NARROW < wide.get_figwidth() / 2
    assert narrow.legends[0].get_window_extent().y0 > narrow.axes[0].get_tightbbox().y1 - 1
