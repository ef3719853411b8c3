"""Hugging Face directories, optimizer state and the formats of other trainers."""
