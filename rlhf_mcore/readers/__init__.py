"""Readers of foreign files: model directories, data files, Hub snapshots, user code. No module here imports torch or numpy."""
