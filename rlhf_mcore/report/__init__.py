"""The report of runs: one HTML file that needs no network. Reads what runs have left in their directories, and changes nothing."""
