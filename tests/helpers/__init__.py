"""Code that several tests share.

A helper that is a program of its own runs from the root as ``python -m tests.helpers.<name>``.
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Root of the repository."""
