"""The commands from Python, in a notebook or a script: ``import rlhf_mcore as rm``.

    def right(solution_str, ground_truth, **_):
        return float(ground_truth in solution_str)

    trained = rm.train(model="my-model", prompts=rows, reward=right, algorithm="grpo", num_steps=5)

``rm.train`` works like ``rlhf-mcore train``, with the same checks, run directory, checkpoints and resume. ``evaluate``, ``convert``
and ``plan`` work like their commands. Without torchrun, a run uses only the current process. If torchrun starts a script in several
processes, the run uses all of them.
"""

from __future__ import annotations

from rlhf_mcore.api.commands import Evaluation as Evaluation
from rlhf_mcore.api.commands import convert as convert
from rlhf_mcore.api.commands import evaluate as evaluate
from rlhf_mcore.api.commands import plan as plan
from rlhf_mcore.api.inputs import Config as Config
from rlhf_mcore.api.inputs import load_config as load_config
from rlhf_mcore.api.training import Callback as Callback
from rlhf_mcore.api.training import Trained as Trained
from rlhf_mcore.api.training import Trainer as Trainer
from rlhf_mcore.api.training import train as train
from rlhf_mcore.config.errors import ConfigError as ConfigError
