"""Settings that every tier needs before anything heavy is imported."""

import os

# Test processes share the cores. One compute thread each also makes sums come out the same on every machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Models are made by the tests; a test that asks the hub for one has a mistake in it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
