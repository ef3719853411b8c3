"""``rlhf-mcore migrate SRC -o OUT.yaml``: carry the common part of a configuration of verl, OpenRLHF or TRL over.

A launch script, a YAML file or a Python script enters; a configuration of ours leaves, with a list of all that could not be carried
over. Begin reading at ``convert.migrate``; ``verl``, ``openrlhf`` and ``trl`` contain the tables of keys.
"""

SUMMARY = "carry a configuration of verl, OpenRLHF or TRL over"
