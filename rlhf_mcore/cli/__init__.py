"""The command line and the composition root, the only place that chooses concrete classes.

The modules that parse and check the command line import torch inside functions only, so that help and configuration errors
appear at once.
"""
