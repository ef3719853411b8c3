"""A running job enters; its engines are listed or changed."""

SUMMARY = "list, add, drain or remove the engines of a running job"
