"""``rlhf-mcore serve-reward CONFIG``: the reward of a configuration behind HTTP, for ``reward.remote.url`` of runs."""

SUMMARY = "score responses that runs send by HTTP"
