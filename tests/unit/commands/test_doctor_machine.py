"""Test verdicts on the machine's numbers."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from rlhf_mcore import machine
from rlhf_mcore.commands.doctor import hardware
from rlhf_mcore.commands.doctor.findings import Finding, as_json, as_text, worst
from rlhf_mcore.commands.doctor.hardware import (
    DiskProbe,
    check_cores,
    check_gpus,
    check_isolation,
    check_memory,
    check_numa,
    check_products,
    check_shared_memory,
    check_storage,
    judge_disk,
    locked_memory,
    open_files,
)
from rlhf_mcore.machine import processor
from rlhf_mcore.sandbox.run import Level
from tests.sysfs import make_sysfs

SMI = """\
NVIDIA H100 80GB HBM3, 81559, 4, 575.57.08, 0, 00000000:1B:00.0
NVIDIA H100 80GB HBM3, 81559, 60000, 575.57.08, 3, 00000000:CA:00.0
"""


def by_check(findings: object) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}  # type: ignore[attr-defined]


def test_gpus_with_foreign_memory_and_errors_are_named() -> None:
    gpus = machine.parse_gpus(SMI)
    assert gpus[1] == machine.Gpu("NVIDIA H100 80GB HBM3", 81559, 60000, "575.57.08", 3, "0000:ca:00.0")
    found = list(check_gpus(gpus))
    assert [(f.check, f.severity) for f in found] == [("gpu", "ok"), ("gpu 1", "warning"), ("gpu 1", "error")]
    assert "60000 of 81559 MiB" in found[1].found and "3 uncorrected" in found[2].found


def test_a_gpu_without_error_counters_has_none() -> None:
    assert machine.parse_gpus("A10, 23028, 0, 550.1, [N/A], 00000000:00:1E.0\n")[0].uncorrected_errors == 0


def test_no_gpu_is_a_note_and_a_broken_driver_an_error() -> None:
    assert [f.severity for f in check_gpus([])] == ["note"]
    assert [f.severity for f in check_gpus("NVML: Driver/library version mismatch")] == ["error"]
    mixed = machine.parse_gpus("A100, 40960, 0, 1, 0, 00000000:1B:00.0\nH100, 81559, 0, 1, 0, 00000000:CA:00.0\n")
    assert [f.severity for f in check_gpus(mixed)] == ["warning"]


def test_a_failing_nvidia_smi_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Unknown Error'\nexit 9\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    assert machine.query_gpus() == "Failed to initialize NVML: Unknown Error"


def test_numa_nodes_of_gpus_are_shown(tmp_path: Path) -> None:
    gpus = machine.parse_gpus(SMI)
    assert check_numa(gpus, {0, 1}, str(tmp_path)).severity == "note"
    sysfs = make_sysfs(tmp_path, {"0000:1b:00.0": 0, "0000:ca:00.0": 1}, {0: "0-3,8-11", 1: "4-7,12-15"})
    shown = check_numa(gpus, set(range(16)), sysfs)
    assert shown.severity == "ok" and "GPU 0 on node 0, GPU 1 on node 1" in shown.found
    far = check_numa(gpus, {8, 9}, sysfs)
    assert far.severity == "warning" and far.found.endswith("node of GPU 1") and "taskset" in far.remedy


def test_threads_beyond_the_cores_are_a_warning_with_a_number_that_fits() -> None:
    assert check_cores({"OMP_NUM_THREADS": "4"}, 32, 8).severity == "ok"
    crowded = check_cores({"OMP_NUM_THREADS": "32"}, 32, 8)
    assert crowded.severity == "warning" and "OMP_NUM_THREADS=4" in crowded.remedy
    assert check_cores({}, 32, 8).severity == "note"


def test_limits() -> None:
    # 512 ranks need about 1,900 descriptors (counted), more than the usual limit of a container
    limits = [(1024, 8), (1024, 512), (4096, 512), (4096, 2048), (resource.RLIM_INFINITY, 2048)]
    assert [open_files(*limit).severity for limit in limits] == ["ok", "error", "ok", "error", "ok"]
    assert "nofile=65536:65536" in (open_files(1024, 512).remedy or "")
    assert locked_memory(8 << 20, has_infiniband=True).severity == "error"
    assert locked_memory(8 << 20, has_infiniband=False).severity == "ok"
    assert locked_memory(resource.RLIM_INFINITY, has_infiniband=True).severity == "ok"


def test_shared_memory_of_an_unconfigured_container_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    docker_default = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255))  # 64 MiB
    monkeypatch.setattr(os, "statvfs", lambda path: docker_default)
    finding = check_shared_memory(has_gpu=False)
    assert finding.severity == "error" and "--shm-size" in finding.remedy
    monkeypatch.undo()
    absent = check_shared_memory(has_gpu=False, path="/no/such/place")
    assert absent.severity == "error" and "/no/such/place" in absent.found and "--shm-size" in absent.remedy


def test_memory(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  67108864 kB\nMemAvailable:  1048576 kB\nHugePages_Total: 0\n")
    finding = check_memory(str(tmp_path / "meminfo"))
    assert (finding.severity, finding.found) == ("warning", "1.0 of 64.0 GiB available")


X86 = """\
processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 9B14
flags\t\t: fpu sse sse2 avx avx2 fma avx512f avx512bw avx512_bf16

processor\t: 1
vendor_id\t: Other
"""
ARM = "processor : 0\nFeatures : fp asimd sve bf16\nCPU implementer : 0x41\nCPU part : 0xd40\n"


def test_kinds_of_processors(tmp_path: Path) -> None:
    (file := tmp_path / "cpuinfo").write_text(X86)
    assert processor(str(file)) == "AuthenticAMD AMD EPYC 9B14 avx avx2 fma avx512f avx512bw avx512_bf16"
    file.write_text(ARM)
    assert processor(str(file)) == "0x41 0xd40 asimd bf16 sve"
    assert processor(str(tmp_path / "absent")) == ""
    assert "MKL_CBWR is AUTO in runs" in check_products({}, "a kind").found
    assert "MKL_CBWR is COMPATIBLE here" in check_products({"MKL_CBWR": "COMPATIBLE"}, "a kind").found


@pytest.mark.parametrize(
    ("level", "severity"),
    [
        (Level("namespaces", ("namespaces", "Landlock 7", "seccomp", "rlimits")), "ok"),
        (Level("namespaces", ("namespaces", "rlimits"), ("seccomp: no libseccomp.so.2",)), "note"),
        (
            Level("filters", ("Landlock 4", "seccomp", "rlimits"), ("namespaces: unshare: Operation not permitted",)),
            "note",
        ),
        (Level("rlimits", ("rlimits",), ("filters: Landlock: not in this kernel",)), "warning"),
    ],
)
def test_how_bad_a_level_is(level: Level, severity: str) -> None:
    finding = check_isolation(level)
    assert (finding.check, finding.severity) == ("sandbox", severity)
    assert all(text in finding.found for text in (level.name, *level.walls, *level.missing))
    assert ("reward.sandbox.minimum=filters" in finding.consequence) == (severity == "warning")


def test_the_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    found = by_check(check_storage(tmp_path / "not" / "yet" / "there", 1 << 20))
    assert set(found) == {"disk space", "disk speed", "clock"}
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_an_error() -> None:
    found = list(check_storage(Path("/proc/no/run"), 1 << 20))
    assert [(f.check, f.severity) for f in found] == [("run directory", "error")]


def test_slow_full_and_skewed_disks() -> None:
    bad = DiskProbe(free_bytes=5 << 30, bytes_per_s=50e6, commit_s=0.1, skew_s=-60.0)
    found = by_check(judge_disk(Path("/scratch"), bad))
    assert {name: f.severity for name, f in found.items()} == dict.fromkeys(
        ("disk space", "disk speed", "clock"), "warning"
    )
    assert "98 GB) in 33 min" in found["disk speed"].consequence  # 98e9 / 50e6 / 60 = 32.7
    good = DiskProbe(free_bytes=5 << 40, bytes_per_s=1e9, commit_s=0.001, skew_s=0.01)
    assert {f.severity for f in judge_disk(Path("/scratch"), good)} == {"ok"}
    assert by_check(judge_disk(Path("/s"), bad, judge_speed=False))["disk speed"].severity == "ok"
    assert hardware.GIB == 1 << 30


def test_text_and_json_say_the_same() -> None:
    findings = [Finding("torch", "ok", "2.13"), Finding("disk", "warning", "slow", "waits", "buy one", node="n1")]
    assert worst(findings) == "warning" and worst([]) == "ok"
    data = as_json(findings)
    assert data["worst"] == "warning"
    assert data["findings"][1]["remedy"] == "buy one"
    text = as_text(findings)
    assert "warning  disk   slow [n1]" in text and "so: waits" in text and "do: buy one" in text
    assert text.endswith("1 warning, 1 ok")


@pytest.mark.parametrize(
    ("devices", "count"), [(None, None), ("", 0), ("-1", 0), ("3", 1), ("0,GPU-8, 2", 3), ("1,-1,2", 1)]
)
def test_devices_that_cuda_sees(devices: str | None, count: int | None) -> None:
    """Devices count up to the first invalid index, as in the CUDA C++ Programming Guide."""
    assert machine.count_visible(devices) == count


@pytest.mark.parametrize(
    ("driver", "torch", "devices", "expected"),
    [
        (True, "2.13.0", "0", True),
        (True, "2.13.0a0+1234.nv26.07", "0", True),
        (True, "2.13.0+cpu", "0", False),
        (True, "2.13.0", "", False),
        (False, "2.13.0", "0", False),
    ],
)
def test_a_run_computes_on_gpus_where_torch_knows_them(
    driver: bool, torch: str, devices: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "has_driver", lambda: driver)
    monkeypatch.setattr(machine.metadata, "version", lambda _: torch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    assert machine.has_gpu() == expected
