"""Trackers, a module each, which imports the package of its service; ``config.choices.TRACKERS`` names them."""
