"""The one error a user of the workload generator can cause."""

from __future__ import annotations


class WorkloadError(ValueError):
    """A setting or an input that cannot be used. The message names it, its value and what would be right."""
