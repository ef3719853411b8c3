"""A published data set or a file of chats enters, training data leaves. Begin with ``prepare``."""

SUMMARY = "make training data of GSM8K, MATH, DAPO, OpenAssistant, chats, preference pairs"
