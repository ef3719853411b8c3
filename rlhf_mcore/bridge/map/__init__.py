"""Describe tensors' places: rectangles in Hugging Face coordinates, and the local tensors that store them."""
