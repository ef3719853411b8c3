"""Trackers for Comet, SwanLab and Trackio. Each module imports the package of its service."""
