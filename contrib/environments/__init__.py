"""Environments of the packages gymnasium, openenv-core and verifiers."""
