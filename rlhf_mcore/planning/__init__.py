"""What a configuration will need, worked out without a GPU, without weights and without torch: memory, traffic and time."""
