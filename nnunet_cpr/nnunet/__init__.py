"""Everything that knows nnU-Net: trainers and their names, what they record, and the demo."""
