"""A reward function enters and is served by HTTP."""

SUMMARY = "score responses that runs send by HTTP"
