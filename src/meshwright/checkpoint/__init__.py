"""Checkpoints on disk, without torch: tensor files, the manifest, and the folder that holds a run's checkpoints."""
