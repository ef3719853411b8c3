"""A model and held-out prompts enter, scores leave. Begin with ``evaluation``."""

SUMMARY = "score a model on held-out prompts, or two side by side"
