"""Containers are lent by HTTP."""

SUMMARY = "lend containers to agents of runs on other machines"
