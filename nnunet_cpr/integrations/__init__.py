"""Adapters for libraries that build optimizers themselves, such as timm.

Libraries that take an optimizer need none: see docs/how-to/ for Hugging Face, Lightning
and MONAI.
"""
