"""Delta sync: send engines the elements that have changed since the last sync (``bridge.full_every``)."""
