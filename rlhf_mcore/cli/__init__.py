"""The command line and the composition root: the one place that picks concrete classes.

Modules here import torch inside functions only, so that help and configuration errors are instant.
"""
