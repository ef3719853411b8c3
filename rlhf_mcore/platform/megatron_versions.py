"""What differs between the versions of Megatron-core that this program runs on: 0.16, and 0.19 (Python 3.12 and later).

Everything else is the same code for both.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core import __version__ as VERSION
from megatron.core import parallel_state

SERIES = ("0.16", "0.19")  # those that the tests have run on; docs/compatibility.md has the results
LOCKED = "0.16.1"


def is_supported() -> bool:
    return VERSION.startswith(tuple(f"{series}." for series in SERIES))


# Globals of the process that later versions read for the data-parallel group, which they may cut once more over ranks that gather
# weights again for the backward pass (GTP). That is not used here, so the groups are the same.
_LATER_GLOBALS = {
    "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "dp_cp",
}
LATER_GLOBALS = {name: axis for name, axis in _LATER_GLOBALS.items() if hasattr(parallel_state, name)}


def submodules_of(experts: Any) -> Any:
    """The parts that a specification of a layer of experts names: it is a ``ModuleSpec`` in 0.16, a partial later."""
    return experts.keywords["submodules"] if isinstance(experts, partial) else experts.submodules
