"""The command ``evaluate``: score a model on held-out prompts. Start reading at ``evaluation``."""

SUMMARY = "score a model on held-out prompts, or two side by side"
