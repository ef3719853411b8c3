"""Containers for agents, which write and read files, run commands, and are graded by tests. Containers are isolated from the host."""
