"""Pure tensor mathematics: one function per paper, with torch only and without process groups."""
