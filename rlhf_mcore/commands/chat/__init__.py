"""A trained model enters, a conversation leaves."""

SUMMARY = "talk to a trained model, in a terminal or from a pipe"
