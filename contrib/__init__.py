"""Plug-ins that few users need. They may change in any release.

One folder per plug-in: README, code, tests. ``setup.py`` registers each by an entry point.
"""
