"""What builds of libraries for a CPU need: equal bits of MKL's products in each run, and torchvision's operators.

By default MKL chooses among its kernels by how buffers happen to be aligned, too. On some processors (seen on AMD's with AVX-512)
the last bits of a product then differ from run to run. Its conditional reproducibility (the variable MKL_CBWR) fixes the kernels.

torchvision's wheels on the package index are for CUDA. Their C++ half does not load beside a torch for the CPU.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

VARIABLE, MODE = "MKL_CBWR", "AUTO"  # AUTO: the best kernels of this processor, whatever the alignment
_ALL, _NONE = -1, 1  # mkl_types.h: MKL_CBWR_ALL, MKL_CBWR_BRANCH_OFF


def make_reproducible() -> bool:
    """Have MKL compute equal bits for equal operands in this process and those that it starts. A mode that the user has set stays.

    Returns False where it is too late: MKL reads the variable once, at its first product.
    """
    os.environ.setdefault(VARIABLE, MODE)
    return mode() != _NONE


def mode() -> int | None:
    """Return the mode that MKL computes in, as numbered in mkl_types.h; None where torch was built without MKL, or does not tell."""
    import torch

    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return int(library.mkl_serv_cbwr_get(_ALL))
    except (OSError, AttributeError):
        return None


# What torchvision 0.28's Python half declares kernels for. Nothing that reads images calls one of them.
_OPERATORS = (
    *("nms", "qnms", "roi_align", "_roi_align_backward", "qroi_align", "roi_pool", "_roi_pool_backward"),
    *("ps_roi_align", "_ps_roi_align_backward", "ps_roi_pool", "_ps_roi_pool_backward"),
    *("deform_conv2d", "_deform_conv2d_backward"),
)


@cache
def declare_image_operators() -> object:
    """Declare torchvision's operators where its C++ half cannot, so that its Python half can be imported afterwards.

    Returns what keeps the declarations alive; None where none are needed.
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
    """Load its C++ half, as torchvision itself would, and return whether that was possible: of a build for the CPU it is."""
    import torch

    try:
        for file in folder.glob("_C*.so"):
            torch.ops.load_library(str(file))
    except OSError:
        return False
    return hasattr(torch.ops.torchvision, "nms")
