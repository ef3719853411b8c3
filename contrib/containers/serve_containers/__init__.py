"""The command ``serve-containers``."""

SUMMARY = "lend containers to agents of runs on other machines"
