"""Mistral (Jiang et al. 2023, arXiv 2310.06825), without its sliding window."""

from rlhf_mcore.families.base import DECODER, Family

FAMILY = Family("mistral", "Mistral", DECODER, window_switch="sliding_window", default_window=4096)
