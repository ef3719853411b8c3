"""NIXL: engines read weights out of registered memory of the trainer's ranks (``bridge.transport: nixl``)."""
