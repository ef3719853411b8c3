"""Containers of Podman, whose command line is Docker's."""

from __future__ import annotations

from rlhf_mcore.environments.containers.container import KindSettings
from rlhf_mcore.environments.containers.docker import DockerKind


def podman_kind(settings: KindSettings) -> DockerKind:
    """Build the container kind ``podman``.

    Raises:
        ConfigError: Podman is not installed.
    """
    return DockerKind("podman", settings)
