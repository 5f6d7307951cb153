"""Requests: parameters, the worker pool, cancellation, progress and outputs."""
