"""OLMo-3 (OLMo Team 2025, arXiv 2512.13961): OLMo-2 with sliding windows in three of four layers."""

from dataclasses import replace

from rlhf_mcore.families.olmo2 import FAMILY as OLMO2
from rlhf_mcore.families.windows import Windows

FAMILY = replace(OLMO2, name="olmo3", architecture="Olmo3", windows=Windows(every=4))
