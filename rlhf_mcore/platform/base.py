"""The questions that the rest of the package may ask of a device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch


class Platform:
    """A kind of device. One instance serves a process."""

    name: ClassVar[str]
    collective_backend: ClassVar[str]  # argument of torch.distributed.init_process_group
    default_dtype: ClassVar[str]  # what model.dtype: auto means here

    def device(self) -> torch.device:
        """The device of this process."""
        raise NotImplementedError

    def setup_process(self, local_rank: int, threads: int) -> None:
        """Claim the device and set compute threads. Called once, before the process group is made."""
        raise NotImplementedError

    def prepare_megatron(self) -> None:
        """Make an imported Megatron-core usable on this device. Called after its modules are imported; idempotent."""

    def megatron_region(self) -> AbstractContextManager[None]:
        """Entered around every call into Megatron-core."""
        return nullcontext()

    def synchronize(self) -> None:
        """Wait for the device."""

    def empty_cache(self) -> None:
        """Give cached device memory back."""
