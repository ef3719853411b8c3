"""Adapt CPU builds of libraries: reproducible products of MKL, and torchvision's operators.

By default, MKL also chooses kernels by the alignment of buffers. On some processors (seen on AMD's with AVX-512) the
last bits of a product then differ between runs. MKL's conditional reproducibility (the variable MKL_CBWR) fixes the
kernels.

torchvision's wheels on the package index are for CUDA. Their C++ half does not load with a CPU build of torch.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

VARIABLE, MODE = "MKL_CBWR", "AUTO"  # AUTO: the best kernels of this processor for any alignment
_ALL, _NONE = -1, 1  # mkl_types.h: MKL_CBWR_ALL, MKL_CBWR_BRANCH_OFF


def make_reproducible() -> bool:
    """Make MKL compute equal bits for equal operands in this process and its children.

    A mode that the user set is kept.

    Return False if it is too late, because MKL reads the variable only once, at its first product.
    """
    os.environ.setdefault(VARIABLE, MODE)
    return mode() != _NONE


def mode() -> int | None:
    """Return MKL's mode as numbered in mkl_types.h, or None if torch was built without MKL or the mode is unknown."""
    import torch

    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return int(library.mkl_serv_cbwr_get(_ALL))
    except (OSError, AttributeError):
        return None


# Operators whose kernels torchvision 0.28 declares in Python. Code that reads images does not call them.
_OPERATORS = (
    *("nms", "qnms", "roi_align", "_roi_align_backward", "qroi_align", "roi_pool", "_roi_pool_backward"),
    *("ps_roi_align", "_ps_roi_align_backward", "ps_roi_pool", "_ps_roi_pool_backward"),
    *("deform_conv2d", "_deform_conv2d_backward"),
)


@cache
def declare_image_operators() -> object:
    """Declare torchvision's operators if its C++ half does not load. Its Python half can then be imported.

    Return an object that keeps the declarations alive, or None if they are not needed.
    """
    import torch

    spec = find_spec("torchvision")
    if torch.version.cuda is not None or spec is None or spec.origin is None or _loads(Path(spec.origin).parent):
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in _OPERATORS:
        library.define(f"{name}(Tensor x) -> Tensor")
    return library


def _loads(folder: Path) -> bool:
    """Load torchvision's C++ half as torchvision would, and return whether that worked. A CPU build loads."""
    import torch

    try:
        for file in folder.glob("_C*.so"):
            torch.ops.load_library(str(file))
    except OSError:
        return False
    return hasattr(torch.ops.torchvision, "nms")
