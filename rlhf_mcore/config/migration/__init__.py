"""Configurations of other trainers -> ours, as far as both have the same thing. Tables, and what applies them."""
