"""The command ``report``: show runs in one HTML page. Start reading at ``page``."""
