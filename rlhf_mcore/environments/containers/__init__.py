"""Containers in which agents work: files in, commands, files out, and tests at the end. Nothing in them reaches the host."""
