"""torchvision's Python half beside a torch for the CPU, in processes of their own: what is imported stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.beside import link, needs
from tests.commands import ROOT

LOADS = """
import transformers
transformers.Qwen3VLForConditionalGeneration, transformers.Gemma3ForConditionalGeneration
import torchvision
print(torchvision.__version__)
"""
DECLARES = """
from rlhf_mcore.platform.cpu_libraries import declare_image_operators
print(declare_image_operators() is declare_image_operators())
"""


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    return subprocess.run(
        [sys.executable, "-c", script], env=os.environ | path, capture_output=True, text=True, timeout=120
    )


@needs("torchvision")
@pytest.mark.skipif(torch.version.cuda is not None, reason="a torch for CUDA loads the C++ half")
def test_classes_of_models_with_images_load_once_operators_are_declared(tmp_path: Path) -> None:
    folder = link(tmp_path, "torchvision")
    declared = run(DECLARES + LOADS, folder)
    assert declared.stdout == "True\n0.28.0+cu130\n", declared.stderr


def test_nothing_is_declared_without_torchvision(tmp_path: Path) -> None:
    done = run(DECLARES + "import torch; print(hasattr(torch.ops.torchvision, 'nms'))", tmp_path)
    assert done.stdout == "True\nFalse\n", done.stderr


@needs("torchvision")
def test_a_rank_of_a_model_without_images_does_not_import_torchvision(tmp_path: Path) -> None:
    imported = "import sys\nimport rlhf_mcore.api, rlhf_mcore.cli.models, rlhf_mcore.mcore.build\nprint('torchvision' in sys.modules)"
    found = run(imported, link(tmp_path, "torchvision"))
    assert found.stdout == "False\n", found.stderr
