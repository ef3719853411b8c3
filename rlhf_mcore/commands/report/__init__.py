"""The command ``report``: show runs in one HTML page. Start reading at ``page``."""

SUMMARY = "write one HTML file about one or more runs: health, curves, time, responses"
