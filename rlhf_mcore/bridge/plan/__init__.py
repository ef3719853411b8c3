"""Plan the rectangles to send between ranks, and their buckets. Pure Python."""
