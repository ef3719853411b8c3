"""The command ``prepare-data``: make training data from published data sets or chats. Start reading at ``prepare``."""

SUMMARY = "make training data from GSM8K, MATH, DAPO, OpenAssistant, chats, preference pairs"
