"""A run or a configuration enters; its schedules, compared, leave. Begin with ``compare``."""

SUMMARY = "schedules of generation and training compared, over a distribution of response lengths"
