"""Adapters of CPR to other libraries."""
