"""Pure tensor mathematics: one paper, one function. Torch only, no process groups."""
