"""Check the keys of a group against each other, and against the files that they name: a module for each group of ``schema``.

Rules are read where a configuration is checked (``validate``); a rank that is handed a resolved one loads none of them.
"""
