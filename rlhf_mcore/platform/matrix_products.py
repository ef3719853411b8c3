"""Matrix products of a CPU whose bits are the same in each run: what MKL has to be asked for.

By default MKL chooses among its kernels by how buffers happen to be aligned, too. On some processors (seen on AMD's with AVX-512)
the last bits of a product then differ from run to run. Its conditional reproducibility (the variable MKL_CBWR) fixes the kernels.
"""

from __future__ import annotations

import ctypes
import os
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
