"""The metrics of a run: what each means, and when it is out of its healthy range."""
