"""Weighbridge: every set of weights that leaves the training yard is weighed, papered and shipped."""

__version__ = "0.1.0"
