"""The commands of ``rlhf-mcore``, except ``train`` and ``completion``. ``cli.main`` lists them.

The module of a command defines ``main`` and ``_parser``. Only ``api``, which offers commands in Python, imports from here. Commands do
not import from each other, except ``watch``, which serves the page of ``report`` (``lint-imports`` checks both rules). A training run
therefore loads none of them.
"""
