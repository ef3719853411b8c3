"""Programs that nobody trusts, such as what a model has written, run in processes of their own that can reach nothing."""
