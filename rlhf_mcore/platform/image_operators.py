"""torchvision beside a torch for the CPU: its wheels on the package index are for CUDA, and their C++ half does not load there."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

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
