"""A tree like /sys that describes NUMA nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def make_sysfs(root: Path, devices: Mapping[str, int], nodes: Mapping[int, str]) -> str:
    """Write the node of each PCI device, and the cores of each node, as Linux does. Returns the path of the tree."""
    for address, node in devices.items():
        _write(root / "bus/pci/devices" / address / "numa_node", str(node))
    for node, cores in nodes.items():
        _write(root / f"devices/system/node/node{node}/cpulist", cores)
    _write(root / "devices/system/node/online", f"{min(nodes)}-{max(nodes)}" if len(nodes) > 1 else str(min(nodes)))
    return str(root)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="ascii")
