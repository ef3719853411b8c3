"""The command ``config``: resolve, compare and explain configurations."""

SUMMARY = "show a resolved configuration, compare two, explain a key"
