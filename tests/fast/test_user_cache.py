"""The user's cache: found without a home folder, and read only where nobody else could have written it."""

import importlib
import os
import sys

import pytest

from fast import user_cache
from fast.launch import nvrtc
from fast.user_cache import NoCacheFolder, UntrustedFile, cache_folder, read_own, sources_key, write_own

SOURCE = ("code", {}, ["-arch=sm_90a"], "kernel")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="owners and modes are POSIX's")


@pytest.fixture
def no_home(monkeypatch):
    """A user of a container: no entry among the users, and no variable."""

    def missing(name):
        raise KeyError(name)

    for name in ("HOME", "AO_LAB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", missing)


def test_variables_come_before_the_home_folder(no_home, monkeypatch, tmp_path):
    with pytest.raises(NoCacheFolder, match=r"no home folder.*set AO_LAB_CACHE"):
        cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert cache_folder() == tmp_path / "caches" / "ao_lab"
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_folders_and_files_are_the_users_alone(tmp_path):
    path = tmp_path / "made" / "kernel"
    write_own(path, b"1")
    write_own(path, b"22")
    assert read_own(path) == b"22"
    assert [entry.stat().st_mode & 0o777 for entry in (path.parent, path)] == [0o700, 0o600]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("variable", "value"), [("XDG_CACHE_HOME", "caches"), ("HOME", "."), ("XDG_CACHE_HOME", "")]
)
def test_the_folder_one_works_in_is_no_cache(no_home, monkeypatch, variable, value):
    """Compiled kernels may lie there that came with a model."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(NoCacheFolder, match="set AO_LAB_CACHE"):
        cache_folder()


def test_folders_above_are_the_users_alone(tmp_path):
    before = os.umask(0)
    try:
        write_own(tmp_path / "cache" / "made" / "kernel", b"1")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("cache", "cache/made")] == [0o700, 0o700]


def test_pipes_are_not_waited_for(tmp_path):
    tmp_path.chmod(0o700)
    os.mkfifo(tmp_path / "kernel", 0o600)
    with pytest.raises(UntrustedFile, match="is no regular file"):
        read_own(tmp_path / "kernel")


@pytest.mark.parametrize("where", ["file", "folder"])
def test_what_others_can_write_is_not_read(tmp_path, where):
    path = tmp_path / "made" / "kernel"
    write_own(path, b"1")
    (path if where == "file" else path.parent).chmod(0o777)
    with pytest.raises(UntrustedFile, match="can be written by other users"):
        read_own(path)


def test_what_another_user_owns_is_not_read(tmp_path, monkeypatch):
    write_own(tmp_path / "made" / "kernel", b"1")
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1)
    if os.stat(tmp_path).st_uid == 0:  # files of root are read by everybody
        os.chown(tmp_path / "made" / "kernel", 12345, -1)
    with pytest.raises(UntrustedFile, match="belongs to another user"):
        read_own(tmp_path / "made" / "kernel")


@pytest.fixture
def compiles(monkeypatch):
    """NVRTC that makes a cubin of its own each time; the list of them."""
    made = []

    def compile_source(*arguments, **options):
        made.append(b"\x7fELF" + bytes([len(made)]))
        return made[-1], ""

    monkeypatch.setattr(nvrtc, "library", lambda: None)
    monkeypatch.setattr(nvrtc, "version_of", lambda found: (13, 0))
    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    return made


def test_a_kernel_that_another_user_planted_is_not_run(compiles, tmp_path, monkeypatch):
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path))
    monkeypatch.setattr(user_cache, "_warned", set())
    assert nvrtc.cached_cubin(*SOURCE) == nvrtc.cached_cubin(*SOURCE) == compiles[0]
    (kept,) = nvrtc.folder().iterdir()
    kept.write_bytes(b"\x7fELF of somebody else")
    kept.chmod(0o666)
    with pytest.warns(UserWarning, match="can be written by other users.*each process compiles its own"):
        assert nvrtc.cached_cubin(*SOURCE) == compiles[-1]
    assert len(compiles) == 2
    assert nvrtc.cached_cubin(*SOURCE) == compiles[1]  # written anew, and nothing is said again


def test_without_a_home_each_process_compiles(compiles, no_home):
    assert nvrtc.cached_cubin(*SOURCE) != nvrtc.cached_cubin(*SOURCE)


def test_a_key_of_sources_is_of_names_and_contents_alone(monkeypatch, tmp_path):
    """One for a package wherever it lies; another for a changed file, a moved one and a changed table."""

    def key(place, **files):
        folder = tmp_path / place / "made_of_sources"
        folder.mkdir(parents=True)
        for name, text in {"__init__.py": "", **files}.items():
            (folder / name).write_text(text)
        monkeypatch.syspath_prepend(folder.parent)
        monkeypatch.delitem(sys.modules, folder.name, raising=False)
        importlib.import_module(folder.name)
        sources_key.cache_clear()
        return sources_key(folder.name)

    first = {"a.py": "x = 1", "table.toml": "b = 1"}
    keys = [key("first", **first), key("elsewhere", **first, **{"notes.txt": "not read"})]
    assert keys[0] == keys[1]
    keys += [key("changed", **first | {"a.py": "x = 2"}), key("table", **first | {"table.toml": "b = 2"})]
    keys.append(key("moved", **{"b.py": "x = 1", "table.toml": "b = 1"}))
    sources_key.cache_clear()
    assert len(set(keys)) == 4
