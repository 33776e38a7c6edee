"""Starting ranks: on this host, under torchrun, under Slurm."""
