"""Training and export of the embedded demo model; needs torch and tokenizers, used nowhere else."""
