"""Cross-validation studies: definition, execution on this machine or on Slurm, and state."""
