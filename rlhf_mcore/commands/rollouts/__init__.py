"""The command ``rollouts``: list or change the engines of a running job."""

SUMMARY = "list, add, drain or remove the engines of a running job"
