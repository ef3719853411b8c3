"""Plug-ins that few users need. They may change in any release.

Each folder is one plug-in, with README, code and tests. ``setup.py`` registers each plug-in as an entry point.
"""
