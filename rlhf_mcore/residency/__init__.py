"""What is on a device and when: parts of models move between the device and the host, in the order of a step's phases."""
