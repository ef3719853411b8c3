"""A metric's name enters, its meaning leaves."""

SUMMARY = "what a metric means, when it is healthy, what to do where it is not"
