"""The command ``evaluate``: score a model on held-out prompts. Start reading at ``evaluation``."""
