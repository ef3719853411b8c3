"""The command ``prepare-data``: make training data from published data sets or chats. Start reading at ``prepare``."""
