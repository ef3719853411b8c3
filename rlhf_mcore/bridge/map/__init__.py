"""Describe where tensors are: rectangles in Hugging Face coordinates, and the places that hold them."""
