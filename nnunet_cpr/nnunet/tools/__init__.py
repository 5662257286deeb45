"""Checks, explanations and exports, which users run beside nnU-Net's commands."""
