"""Figures of formats, schemes and models, drawn by matplotlib: `pip install 'ao_lab[plot]'`.

    figure = ao_lab.plot.values("float4_e2m1fn", "int4", "nf4")
    figure.savefig("values.svg")

Each function returns the matplotlib Figure; with `ax=` it draws into axes of the caller and returns their figure. Figures need
no hover: axes have names and units, curves have a marker and a line of their own beside a colour of Okabe and Ito's palette.
`theme="dark"` is for dark pages; axes of the caller keep their background, and colours follow it. `save` writes a file whose
text stays text and says what the figure is (title and description of the SVG, for screen readers).
"""

from ao_lab.plot.number_lines import error, formats, values
from ao_lab.plot.style import save
from ao_lab.plot.tensors import SchemeError, scheme_errors, schemes, tensor
from ao_lab.plot.tradeoff import Point, tradeoff

__all__ = [
    "Point",
    "SchemeError",
    "error",
    "formats",
    "save",
    "scheme_errors",
    "schemes",
    "tensor",
    "tradeoff",
    "values",
]
