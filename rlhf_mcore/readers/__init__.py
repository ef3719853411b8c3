"""Read what comes from outside: model directories, data files, the hub, the user's code. Nothing here imports torch or numpy."""
