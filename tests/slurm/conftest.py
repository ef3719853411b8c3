"""Start one cluster for all tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing_programs, running_cluster

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if missing := missing_programs():
        pytest.skip(f"SLURM is not installed here ({', '.join(missing)}); ./launch/test.sh --with slurm installs it")
    with running_cluster(tmp_path_factory.mktemp("slurm")) as running:
        running.environment |= {
            "RLHF_MCORE_PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
            "RLHF_MCORE_GRACE_S": "10",
            "PATH": f"{ROOT / 'launch' / 'slurm'}:{running.environment['PATH']}",
        }
        yield running
