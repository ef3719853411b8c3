"""Rules that check keys against other keys and against the files that they name.

Only ``validate`` imports these modules. A rank receives a resolved configuration and does not load them.
"""
