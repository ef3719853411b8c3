"""What is installed enters, held against transformers layout by layout; one table leaves. Begin with ``command``."""

SUMMARY = "hold what is installed against transformers, family by family, layout by layout; the first thing to run on a cluster"
