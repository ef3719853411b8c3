"""Read what comes from outside: model directories, data files, the hub. Nothing here imports torch or numpy."""
