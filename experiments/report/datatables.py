"""DataTables for the HTML pages: sorting and filtering of tables without a network.

The script and its style come from the package itables, which ships them for notebooks without a network (MIT). They are stored
compressed beside the pages (about 0.25 MB) and unpacked by the browser when the first table is opened; without scripts the
tables are plain HTML.
"""

from __future__ import annotations

import base64
import gzip
import importlib.resources
import json
from functools import lru_cache


@lru_cache(maxsize=1)
def script() -> str:
    """A script that names the library's script (`js`) and style (`css`), base64 of gzip."""
    folder = importlib.resources.files("itables") / "html"
    found = {kind: packed((folder / f"dt_bundle.{kind}").read_bytes()) for kind in ("js", "css")}
    return f"window.DATATABLES = {json.dumps(found)};\n"


def packed(data: bytes) -> str:
    """Base64 of gzip, the same for the same bytes."""
    return base64.b64encode(gzip.compress(data, compresslevel=9, mtime=0)).decode()
