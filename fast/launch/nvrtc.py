"""CUDA C++ to a cubin by NVRTC, which comes with torch's wheels for CUDA; and the cubins that are kept on disk.

NVRTC needs no GPU and no CUDA headers of an installation. A cubin's name has a digest of all that it depends on: source,
headers, options and version of NVRTC. Files are in `cubins` of AO_LAB_CACHE, else of the user's cache; where nothing can be
written there, or another user could have written it (`fast.user_cache`), each process compiles for itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from fast.user_cache import UntrustedFile, cache_folder, read_own, warn_once, write_own

LOG = logging.getLogger("ao_lab.kernels")
#: Versions of CUDA whose library is looked for, and the oldest that knows sparse wgmma and `-arch=sm_90a` well.
MAJORS = (13, 12)
OLDEST = (12, 4)


class CompileError(RuntimeError):
    """NVRTC refused a source; the message is its log."""


@lru_cache(maxsize=1)
def library() -> Any:
    """NVRTC; RuntimeError that says what to install where there is none, or too old a one."""
    for candidate in _candidates():
        with contextlib.suppress(OSError):
            result = ctypes.CDLL(str(candidate))
            result.nvrtcGetErrorString.restype = ctypes.c_char_p
            if version_of(result) < OLDEST:
                raise RuntimeError(
                    f"NVRTC {'.'.join(map(str, version_of(result)))} ({candidate}) is older than {OLDEST[0]}.{OLDEST[1]}; "
                    f"pip install -U nvidia-cuda-nvrtc"
                )
            return result
    raise RuntimeError(
        "products in CUDA C++ on a GPU are compiled at first use by NVRTC, which was not found: pip install nvidia-cuda-nvrtc, "
        "or install torch with CUDA, which brings it"
    )


@lru_cache(maxsize=1)
def missing_compiler() -> str | None:
    """Why there is no NVRTC to compile with, and what to install; None where there is."""
    try:
        library()
    except RuntimeError as error:
        return str(error)
    return None


def _candidates() -> Iterator[Path | str]:
    """Files of Python packages first, then names that the system's loader knows."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for major in MAJORS:
            yield from sorted(Path(folder).glob(f"cu{major}/lib/libnvrtc.so.{major}"))
            yield from sorted(Path(folder).glob(f"cuda_nvrtc/lib/libnvrtc.so.{major}"))
    for major in MAJORS:
        yield f"libnvrtc.so.{major}"


def version_of(nvrtc: Any) -> tuple[int, int]:
    """(major, minor)."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def compile_source(
    source: str,
    headers: Mapping[str, str],
    options: Sequence[str],
    ptx: bool = False,
    name: str = "kernel",
) -> tuple[bytes, str]:
    """(cubin, log) of a source; ptx: its PTX in place of the cubin. CompileError where NVRTC refuses it. name: for messages."""
    nvrtc, program = library(), ctypes.c_void_p()
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    _check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), f"{name}.cu".encode(), len(headers), texts, names
        )
    )
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), given)
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        text = log.rstrip(b"\0").decode(errors="replace")
        if status:
            raise CompileError(f"NVRTC does not compile {name}.cu with {' '.join(options)}:\n{text}")
        get = (
            (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
            if ptx
            else (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        )
        return _read(*get, program), text
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(size_of: Any, get: Any, program: Any) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(get(program, buffer))
    return buffer.raw


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"NVRTC: {library().nvrtcGetErrorString(status).decode()}")


def cached_cubin(source: str, headers: Mapping[str, str], options: Sequence[str], name: str) -> bytes:
    """The cubin of a source, from disk where it is there. name: the files begin with it."""
    parts = (
        source,
        *(part for item in headers.items() for part in item),
        *options,
        str(version_of(library())),
    )
    file = f"{name}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.cubin"
    kept = _kept(file)
    if kept is not None:
        return kept
    LOG.info("compiling %s.cu, which no cache holds", name)
    cubin, _ = compile_source(source, headers, options, name=name)
    with contextlib.suppress(OSError):
        write_own(folder() / file, cubin)
    return cubin


def _kept(name: str) -> bytes | None:
    """A cubin from disk; None where there is none, and, with one warning, where another user could have written it."""
    try:
        kept = read_own(folder() / name)
    except UntrustedFile as error:
        warn_once(f"{error}; compiled kernels there are not used, each process compiles its own")
        return None
    except OSError:
        return None
    return kept if kept.startswith(b"\x7fELF") else None


def folder() -> Path:
    """Where cubins are kept; `NoCacheFolder` where there is no place for a cache."""
    return cache_folder() / "cubins"


__all__ = ["CompileError", "cached_cubin", "compile_source", "folder", "library", "version_of"]
