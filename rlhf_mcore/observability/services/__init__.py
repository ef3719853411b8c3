"""Trackers. Each module imports the package of its service; ``config.choices.find_trackers`` lists them."""
