"""Adapters for libraries that build optimizers themselves, such as timm.

``timm.py`` registers CPR's optimizers in timm; ``from_timm.py`` gives timm's optimizers to our trainers.
Libraries that take an optimizer need none: see docs/how-to/ for Hugging Face, Lightning
and MONAI.
"""
