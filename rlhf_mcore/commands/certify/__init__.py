"""Hold what is installed against transformers, layout by layout, and write one table. Begin with ``command``."""

SUMMARY = "hold what is installed against transformers, family by family, layout by layout; the first thing to run on a cluster"
