"""Adapters for libraries that build optimizers themselves, such as timm.

Libraries that take an optimizer need none: see docs/recipes.md for Hugging Face and Lightning, and
docs/trainers.md for MONAI.
"""
