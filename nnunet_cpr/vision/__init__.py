"""Vision and other tasks outside of nnU-Net, on the CPR core: runs, sweeps and their figures."""
