"""Tasks and sweeps outside of nnU-Net: runs, heat maps and other figures."""
