"""The page of ``report``, served while a run writes."""

SUMMARY = "the same page in a browser during a run"
