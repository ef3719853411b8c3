"""Delta sync: send engines only the elements that changed since the last sync (``bridge.full_every``)."""
