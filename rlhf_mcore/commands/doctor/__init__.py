"""The command ``doctor``: check a machine and report findings."""

SUMMARY = "check versions, kernels, the machine, its disk and the network between ranks"
