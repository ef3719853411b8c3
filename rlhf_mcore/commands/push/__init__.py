"""The command ``push``: upload the trained model of a run."""

SUMMARY = "upload the trained model of a run to the Hugging Face hub, with a model card"
