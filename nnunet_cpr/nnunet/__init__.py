"""Code that runs inside nnU-Net or reads its files: trainers, checkpoints, history, export."""
