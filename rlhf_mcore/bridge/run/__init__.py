"""A plan carried out: messages, and the tensors they are written to."""
