"""A room for each command: a package holds the command and all that only it needs.

A room has a ``SUMMARY``, a ``main`` and a ``_parser``; ``rlhf-mcore`` finds it by its folder. Nothing outside imports from here, and
rooms do not import from each other (``lint-imports``), so a training run loads none of them.
"""
