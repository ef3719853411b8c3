"""Build and load the library that lets a CPU build of torch hold CUDA tensors without data."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")


def missing() -> str:
    """Return the missing requirement of fake CUDA tensors on this machine, or "" if there is none."""
    if _compiler() is None:
        return "needs a C++ compiler (g++, or that of CXX)"
    if any((_torch() / "lib").glob("libtorch_cuda*")):
        return "needs a CPU build of torch; this one has CUDA"
    return ""


def load() -> None:
    """Build the library and load it into this process. Call it before importing torch."""
    assert "torch" not in sys.modules, "torch asks for the hooks of its devices when it is imported"
    if reason := missing():
        raise RuntimeError(f"fake CUDA tensors: {reason}")
    torch, compiler = _torch(), _compiler()
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libguard.so"
        options = ["-shared", "-fPIC", "-std=c++20", "-w", f"-I{torch / 'include'}"]
        links = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
        subprocess.run([str(compiler), *options, str(SOURCE), "-o", str(library), *links], check=True)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def _torch() -> Path:
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent
