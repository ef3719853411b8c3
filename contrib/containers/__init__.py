"""Containers of Podman and of a service, tasks of Harbor, Terminal-Bench and SWE-bench, and lending by HTTP."""
