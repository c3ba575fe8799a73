"""DataTables for the HTML page: sorting and filtering of tables without a network.

The script and its style come from the package itables, which ships them for notebooks without a network (MIT). They are stored
compressed in the page (about 0.25 MB) and unpacked by the browser when the first table is opened; without scripts the tables
are plain HTML.
"""

from __future__ import annotations

import base64
import gzip
import importlib.resources
from functools import lru_cache


@lru_cache(maxsize=1)
def bundle() -> dict[str, str]:
    """The script (`js`) and the style (`css`) as base64 of gzip."""
    folder = importlib.resources.files("itables") / "html"
    return {kind: packed((folder / f"dt_bundle.{kind}").read_bytes()) for kind in ("js", "css")}


def packed(data: bytes) -> str:
    """Base64 of gzip, the same for the same bytes."""
    return base64.b64encode(gzip.compress(data, compresslevel=9, mtime=0)).decode()
