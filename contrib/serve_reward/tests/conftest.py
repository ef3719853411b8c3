from tests.unit.rewards.conftest import *  # noqa: F403
