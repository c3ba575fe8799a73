"""Records of schemes as others may have written them."""

import pytest

from ao_lab.checkpoint.io.strict_json import check_scheme_fields
from reference import SCHEMES
from reference.schemes.schemes import scheme_fields


@pytest.mark.parametrize("name", ["\x1b[31mmxfp4", "mxfp4\nint8", "\ud800", "mx\u202efp4"])
def test_names_of_schemes_are_shown_as_they_are(name):
    """Reports and tables show them; names of formats are checked where formats are made."""
    fields = scheme_fields(SCHEMES["mxfp4"])
    check_scheme_fields(fields, "weight")
    with pytest.raises(ValueError, match=r"weight: name is printable text on one line, got .*\\"):
        check_scheme_fields(fields | {"name": name}, "weight")
