"""Embedded models and the resolution of `model_source`."""
