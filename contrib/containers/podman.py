"""Containers of Podman, whose command line is Docker's."""

from __future__ import annotations

from rlhf_mcore.environments.containers.container import KindSettings
from rlhf_mcore.environments.containers.docker import DockerKind


def podman_kind(settings: KindSettings) -> DockerKind:
    """Make the kind of containers that Podman keeps.

    Raises:
        ConfigError: Podman is not installed.
    """
    return DockerKind("podman", settings)
