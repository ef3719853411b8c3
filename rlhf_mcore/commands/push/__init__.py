"""The trained model of a run enters and is uploaded."""

SUMMARY = "upload the trained model of a run to the Hugging Face hub, with a model card"
