"""``rlhf-mcore migrate SRC -o OUT.yaml``: convert a configuration of verl, OpenRLHF or TRL.

The source is a launch script, a YAML file or a Python script. The result is a configuration of rlhf_mcore with a list
of the keys that have no counterpart. Start reading at ``convert.migrate``. ``verl``, ``openrlhf`` and ``trl`` contain
the tables of keys. In this package, "theirs" means keys and values of the other trainer, and "ours" means keys and
values of rlhf_mcore.
"""

SUMMARY = "carry a configuration of verl, OpenRLHF or TRL over"
