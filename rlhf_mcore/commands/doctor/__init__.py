"""The command ``doctor``: check a machine and report findings."""
