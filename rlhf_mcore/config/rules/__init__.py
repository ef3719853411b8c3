"""Check the keys of a group against other keys and against the files that they name. One module per group of ``schema``.

Only ``validate`` imports the rules. A rank gets a resolved configuration and does not load them.
"""
