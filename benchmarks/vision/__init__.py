"""Results of vision sweeps, and figures that ``nnunet-cpr vision draw`` does not make."""
