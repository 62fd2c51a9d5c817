"""Merging of attention states: partial attention outputs with their log-sum-exp."""

from __future__ import annotations

from kvexp_kernels.merge_states.reference import merge_many, merge_states

__all__ = ["merge_many", "merge_states"]
