"""``rlhf-mcore serve-reward CONFIG``: serve the reward of a configuration over HTTP, for ``reward.remote.url`` of runs."""

SUMMARY = "score responses that runs send by HTTP"
