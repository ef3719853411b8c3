"""Engines in processes of their own, under Ray. The only package that imports ray for them, and that lazily."""
