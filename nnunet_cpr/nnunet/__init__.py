"""Code that runs inside nnU-Net or reads its files: trainers, checkpoints, history, export."""

from nnunet_cpr.environment import TRAINERS_NEED, check_installed

check_installed(__name__, TRAINERS_NEED)
