"""What users run beside nnU-Net's commands: checks, explanations and exports."""
