"""`SCHEMES` filled: the default schemes, then the conventions of other projects, which are built from them."""

from __future__ import annotations

from reference.schemes.conventions import conventions
from reference.schemes.default_schemes import default_schemes
from reference.schemes.schemes import BUILT_IN, RECORDS, SCHEMES, Scheme


def load_schemes() -> dict[str, Scheme]:
    """`SCHEMES`, filled by the first call, which `import reference` does."""
    if not SCHEMES:
        SCHEMES.update({scheme.name: scheme for scheme in [*default_schemes(), *conventions()]})
        # A record that only served to build another may have had the name of one of these.
        RECORDS.update(SCHEMES)
        BUILT_IN.update(SCHEMES)
    return SCHEMES


__all__ = ["load_schemes"]
