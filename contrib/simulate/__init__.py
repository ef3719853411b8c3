"""Compare schedules of generation and training for a configuration or a run. Start reading at ``compare``."""

SUMMARY = "schedules of generation and training compared, over a distribution of response lengths"
