"""Sizes in bytes."""

GIB = 2**30
