"""A machine enters, findings leave."""

SUMMARY = "check versions, kernels, the machine, its disk and the network between ranks"
