"""Run plans: send messages, and write the received tensors."""
