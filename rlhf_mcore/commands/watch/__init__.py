"""The command ``watch``: serve the page of ``report`` during a run."""

SUMMARY = "show the page of report in a browser during a run"
