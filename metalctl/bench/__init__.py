"""Measuring: this program and its peers on the same weights, in turn, in one call."""
