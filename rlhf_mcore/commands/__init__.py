"""A room for each command: a package holds the command and all that only it needs.

A room has a ``SUMMARY``, and a module ``command`` with ``main`` and ``_parser``; ``rlhf-mcore`` finds it by its folder. Only ``api``,
which offers commands in Python, imports from here. Rooms do not import from each other, but ``watch``, which serves the page of
``report`` (``lint-imports`` checks both). So a training run loads none of them.
"""
