"""NIXL: engines read weights from registered memory of the trainer ranks (``bridge.transport: nixl``)."""
