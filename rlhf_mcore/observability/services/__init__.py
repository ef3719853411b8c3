"""Trackers, a module each, which imports the package of its service; ``config.choices.find_trackers`` names them."""
