"""The command ``convert``: convert a model from one format to another. Start reading at ``conversion``."""
