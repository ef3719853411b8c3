"""Podman containers, containers of a service, tasks of Harbor, Terminal-Bench and SWE-bench, and lending over HTTP."""
