"""The command ``reward-test``: show the scores that a reward gives to right and wrong answers in the data."""

SUMMARY = "test the reward on the data: it must accept ground truths and reject other answers"
