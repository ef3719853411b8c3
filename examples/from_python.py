"""The quickstart's task with a reward from Python. After ./launch/quickstart.sh: python examples/from_python.py [a.b=c ...]"""

import sys

import rlhf_mcore as rm


def right_sum(data_source, solution_str, ground_truth, extra_info):
    """Return 1 for the right number, and a small reward for the form of an answer."""
    return 1.0 if solution_str.strip() == f"#### {ground_truth}" else 0.1 * solution_str.startswith("####")


one_process = ["actor.layout.tp=1", "trainer.world_size=1"]
cfg = rm.load_config("configs/quickstart/grpo.yaml", ["experiment=from-python", *one_process, *sys.argv[1:]])
trained = rm.train(cfg, reward=right_sum, callbacks=[lambda step, metrics: print(step, metrics["reward/mean"])])
print(trained.model)
