"""One package per command, with the code that only this command needs.

Each package defines ``SUMMARY``, and a module ``command`` with ``main`` and ``_parser``. ``rlhf-mcore`` finds the packages by
their folders. Only ``api``, which offers commands in Python, imports from here. The packages do not import from each other, except
``watch``, which serves the page of ``report`` (``lint-imports`` checks both rules). A training run therefore loads none of them.
"""
