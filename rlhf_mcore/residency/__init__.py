"""Move parts of models between the device and the host, in the order of a step's phases."""
