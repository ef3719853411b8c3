"""Delta saves: weight files as compressed differences to the last full checkpoint."""
