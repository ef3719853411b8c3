"""Recipes of ``prepare-data`` for data sets that few users need."""
